"""The early end of a command: a line for the user, a number for the shell."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CommandError(Exception):
    """A command cannot continue.

    The text is one line with the problem and its cure. Bugs of the library are never reported like this: they keep
    their traceback.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def meant(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the known word that it resembles, if there is one."""
    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def wrong_input(message: str) -> CommandError:
    """Return an error that the caller fixes by changing the command: exit code 2, as in argparse."""
    return CommandError(message, exit_code=2)
