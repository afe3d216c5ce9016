"""The early end of a command: a line for the user, a number for the shell."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot continue.

    The text is one line with the problem and its cure. Bugs of the library are never reported like this: they keep
    their traceback.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def wrong_input(message: str) -> CommandError:
    """Return an error that the caller fixes by changing the command: exit code 2, as in argparse."""
    return CommandError(message, exit_code=2)
