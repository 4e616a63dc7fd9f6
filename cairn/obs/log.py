"""Sets up logging to stderr, one line per record.

CAIRN_LOG sets the level, CAIRN_LOG_FORMAT the format (text or json).
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
"""Id of the HTTP request that the current task serves, which all of its log records contain."""


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
    """One JSON object per line. `extra={"fields": {...}}` of a log call adds keys to it."""

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
    """Set up the `cairn` logger. A second call only changes the level and the format.

    The format is read from CAIRN_LOG_FORMAT, "text" or "json", which child processes inherit.

    Args:
        level: "debug", "info", "warning" or "error"; None takes CAIRN_LOG, or "warning".
        also: names of library loggers whose warnings are logged in the same way.

    Raises:
        BadConfig: an unknown level or format.
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
