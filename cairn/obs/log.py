"""Log lines: standard logging, one line per record, on stderr.

CAIRN_LOG chooses the level, CAIRN_LOG_FORMAT the form (text or json).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from cairn.errors import BadConfig

ENVIRONMENT_VARIABLE = "CAIRN_LOG"
FORMAT_VARIABLE = "CAIRN_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The HTTP request that the current task serves; every record made meanwhile carries it."""


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record).replace("\n", " | ") + "\n")
        except (OSError, ValueError):
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        current = request_id.get()
        return f"{line} [{current}]" if current is not None else line


class _JsonFormatter(logging.Formatter):
    """One object a line. What a call passes as `extra={"fields": {...}}` becomes keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(level: str | None = None, also: tuple[str, ...] = ()) -> None:
    """Set up the `cairn` logger. Calling it again only changes the level and the form.

    Args:
        level: "debug", "info", "warning" or "error"; None takes CAIRN_LOG, or "warning".
        also: loggers of libraries whose warnings go the same way.

    The form is that of CAIRN_LOG_FORMAT, "text" or "json": processes started by this one follow.

    Raises:
        BadConfig: an unknown level or form.
    """
    name = (level or os.environ.get(ENVIRONMENT_VARIABLE) or "warning").lower()
    if name not in LEVELS:
        raise BadConfig(f"log level {name!r} is unknown", f"Known: {', '.join(LEVELS)}")
    form = os.environ.get(FORMAT_VARIABLE) or "text"
    if form not in FORMATS:
        raise BadConfig(f"log format {form!r} is unknown", f"Known: {', '.join(FORMATS)}")
    formatter = _JsonFormatter() if form == "json" else _TextFormatter()
    for owner in ("cairn", *also):
        logger = logging.getLogger(owner)
        handlers = [h for h in logger.handlers if isinstance(h, _StderrHandler)]
        if not handlers:
            handlers = [_StderrHandler()]
            logger.addHandler(handlers[0])
        handlers[0].setFormatter(formatter)
        logger.setLevel(name.upper() if owner == "cairn" else "WARNING")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`."""
    return logging.getLogger(name)
