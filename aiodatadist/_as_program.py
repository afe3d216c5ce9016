"""Makes Ctrl-C quiet while ``python -m aiodatadist`` imports the package, which takes up to a second.

The package imports this module first. No ``__main__`` could help: python runs that when the package has been imported.
"""

import os
import signal
import sys


def _is_program() -> bool:
    """Return True if python is looking for the program ``-m aiodatadist``: only then the first argument is ``-m``."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in given and given[given.index("-m") + 1 :][:1] == ["aiodatadist"]


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)  # as a shell reports it; nothing has been done that could be cleaned up


def imported() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for which the command is prepared."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
