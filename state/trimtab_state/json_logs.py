"""Logs of a process as JSON lines on stderr: the record, and the plain values given beside it as `extra`.

The one rule: no prompt text, token or credential is ever passed to a logger.
"""

import json
import logging
import sys
from typing import Final

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _OWN and _is_plain(value)}
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_to_stderr(level: str) -> None:
    """Log everything from that level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)
