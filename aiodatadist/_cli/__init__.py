"""The command line: ``demo`` shows a KV cache travel, ``bench`` says how fast, ``doctor`` what this machine offers.

Exit codes: 0 success, 1 failure (the demo's tokens differ, a worker died, doctor found something fatal), 2 the command
is wrong, 130 interrupted, 141 the reader of the output went away. Errors are one line on stderr. Without a command the
help is printed, and the code is 2.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from aiodatadist._cli.kit.errors import CommandError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    _open_closed_streams()
    try:
        try:
            from aiodatadist._cli.arguments import parse  # noqa: PLC0415 - Ctrl-C during the imports is quiet, too

            command = parse(sys.argv[1:] if argv is None else argv)
            return command()
        finally:
            print(end="", flush=True)  # here, and not when the interpreter ends, which would complain
    except CommandError as error:
        print(f"aiodatadist: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output went away; the interpreter's last flush must not complain
        _stop_writing()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _stop_writing()  # the disk is full
        print(f"aiodatadist: {error}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Replace a standard stream that is closed (``>&-``) by /dev/null, under its own number, here and in the workers."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_WRONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _stop_writing() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
