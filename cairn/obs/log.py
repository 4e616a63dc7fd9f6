"""Log lines: standard logging, one line per record, on stderr, level chosen by CAIRN_LOG."""

from __future__ import annotations

import logging
import os
import sys

from cairn.errors import BadConfig

ENVIRONMENT_VARIABLE = "CAIRN_LOG"
LEVELS = ("debug", "info", "warning", "error")


class _StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is now: a live progress bar puts the lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record).replace("\n", " | ") + "\n")
        except (OSError, ValueError):
            self.handleError(record)


def configure(level: str | None = None) -> None:
    """Set up the `cairn` logger. Calling it again only changes the level.

    Args:
        level: "debug", "info", "warning" or "error"; None takes CAIRN_LOG, or "warning".

    Raises:
        BadConfig: an unknown level.
    """
    name = (level or os.environ.get(ENVIRONMENT_VARIABLE) or "warning").lower()
    if name not in LEVELS:
        raise BadConfig(f"log level {name!r} is unknown", f"Known: {', '.join(LEVELS)}")
    logger = logging.getLogger("cairn")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        line = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(name.upper())


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`."""
    return logging.getLogger(name)
