"""The options that several commands have: how each is added to a parser, checked, and used."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.numbers import integer

STDOUT = "-"
"""The file name of ``--json`` that means stdout, where nothing else is then written."""


def add_seed(parser: argparse._ActionsContainer, what: str, default: int | None = None) -> None:
    """Add ``--seed``. ``what`` describes its effect, and its default."""
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=default, metavar="N", help=what)


def add_loop(parser: argparse._ActionsContainer, default: str | None, what: str) -> None:
    """Add ``--loop``, the event loop."""
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default=default, help=what)


def add_json(parser: argparse._ActionsContainer, *, may_lack_file: bool = False) -> None:
    """Add ``--json``, a file for the report. With ``may_lack_file``, ``--json`` alone means stdout."""
    what = f"the report for machines ({'without a file, or ' if may_lack_file else ''}-: only that, on stdout)"
    if may_lack_file:
        parser.add_argument("--json", nargs="?", const=Path(STDOUT), type=Path, metavar="FILE", help=what)
    else:
        parser.add_argument("--json", type=Path, metavar="FILE", help=what)


def is_stdout(file: Path | None) -> bool:
    return str(file) == STDOUT


def write_report(option: str, file: Path | None, text: str) -> None:
    """Write a report to the file of an option, or to stdout. No effect without the option.

    Raises:
        CommandError: if the file cannot be written.
    """
    if is_stdout(file):
        print(text)
    elif file is not None:
        try:
            file.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{option}: {file} cannot be written: {error.strerror or error}") from error


def check_target(option: str, file: Path | None) -> None:
    """Check, before a run of minutes, that the file of an option can be written, without touching its contents.

    Raises:
        CommandError: if it cannot, with the reason.
    """
    reason = None if file is None or is_stdout(file) else _refusal(file)
    if reason is not None:
        raise wrong_input(f"{option}: {file} cannot be written: {reason}")


def _refusal(file: Path) -> str | None:
    folder = file.parent
    try:
        if file.is_dir():
            return "it is a folder"
        if file.exists():
            return None if os.access(file, os.W_OK) else "it is read-only"
        if not folder.is_dir():
            return f"there is no folder {folder}"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} is read-only"
    except OSError as error:  # a name that is too long
        return error.strerror or str(error)


def read_option(option: str, file: Path) -> str:
    """Return the text of a file that an option names. Raises CommandError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong_input(f"{option}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def address(option: str, text: str, host: str = "") -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address must be in brackets. With ``host``, a port is enough.

    Raises:
        CommandError: if the text has another form.
    """
    given, colon, port = text.rpartition(":")
    host = given.removeprefix("[").removesuffix("]") if colon else host
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise wrong_input(f"{option}: {text!r} is not HOST:PORT, with a port from 0 to 65535")
    return host, int(port)
