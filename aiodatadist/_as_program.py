"""Makes Ctrl-C quiet while ``python -m aiodatadist`` or ``aiodatadist.blocking`` imports the package: up to a second.

The package imports this module first. A ``__main__`` could not do this, because python runs it only after the import.
"""

import os
import signal
import sys

PROGRAMS = ("aiodatadist", "aiodatadist.blocking")


def _is_program() -> bool:
    """Return True if python is looking for one of our programs: only then is the first argument ``-m``."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in given and given[given.index("-m") + 1] in PROGRAMS


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)  # as a shell reports it; nothing has been done that could be cleaned up


def imported() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for which the command is prepared."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
