"""The early end of a command: one line for people, one number for the shell."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot go on. The text is one line that says what is wrong and what to do about it.

    Never a bug of the library: those keep their traceback.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def wrong_input(message: str) -> CommandError:
    """Return an error that the caller mends by changing the command: exit code 2, as argparse has it."""
    return CommandError(message, exit_code=2)
