"""Logs as one JSON object a line.

The one rule: a line holds what the code put there on purpose (message and named values), never a prompt, its tokens or
a payload. Values that are no JSON are written as text.
"""

import json
import logging
import sys
from typing import IO

STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
VALUE_CHARS_MAX = 2_000
"""A longer text is cut."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in record.__dict__.items():
            if name not in STANDARD:
                line[name] = value[:VALUE_CHARS_MAX] if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_json(level: str, stream: IO[str] | None = None) -> None:
    """Send every log record to `stream` (standard error) as JSON."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
