"""Warnings of a script that did not configure logging: one line each on stderr, as Python's last-resort handler does."""

from __future__ import annotations

import logging
import sys
from typing import Final


class LastResort(logging.Handler):
    """A handler that writes warnings and errors to stderr while no other handler would see them, without tracebacks.

    The package's NullHandler silences Python's own last resort, which is right for a library. But the user of a script
    would never see why something is slow, lost or without effect.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or self._is_configured(record.name):
            return
        try:
            sys.stderr.write(one_line(record) + "\n")
        except Exception:
            self.handleError(record)

    def _is_configured(self, name: str) -> bool:
        """Return True if a logger that the record reaches has a handler of the script's."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(not isinstance(each, (logging.NullHandler, LastResort)) for each in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def one_line(record: logging.LogRecord) -> str:
    """Return the message, and the exception without its traceback, as one line."""
    text = record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        text += f": {type(error).__name__}: {error}"
    return " ".join(text.split("\n"))


_handler: Final = LastResort()


def install() -> None:
    """Handle the records of all loggers of the package. Does nothing the second time."""
    logging.getLogger("aiodatadist").addHandler(_handler)
