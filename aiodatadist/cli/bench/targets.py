"""A check that a file can be written, made before a run of minutes, without touching what is there."""

from __future__ import annotations

import os
from pathlib import Path

from aiodatadist.cli.kit.errors import wrong_input


def check_target(option: str, into: Path) -> None:
    """Check that ``into``, which this option names, can be written. Raises CommandError with the reason if it cannot."""
    reason = _reason(into)
    if reason is not None:
        raise wrong_input(f"{option}: {into} cannot be written: {reason}")


def _reason(into: Path) -> str | None:
    folder = into.parent
    try:
        if into.is_dir():
            return "it is a folder"
        if into.exists():
            return None if os.access(into, os.W_OK) else "it is read-only"
        if not folder.is_dir():
            return f"there is no folder {folder}"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} is read-only"
    except OSError as error:  # a name that is too long
        return error.strerror or str(error)
