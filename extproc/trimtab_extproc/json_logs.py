"""Logs as JSON lines on stderr.

The one rule: no prompt text, token or credential is ever passed to a logger.
"""

import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    """One record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def log_to_stderr(level: str) -> None:
    """Log everything from that level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
