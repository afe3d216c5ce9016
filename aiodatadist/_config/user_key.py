"""The key of this user: links between this user's processes on one machine use it, so other users cannot link.

The first process that needs it creates it. If several do so at the same time, all of them use the file of the first.
"""

from __future__ import annotations

import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiodatadist._config.secret_files import check_folder, read_secret
from aiodatadist.errors import ParamInvalid, explained

FOLDER: Final = "aiodatadist"
FILE: Final = "key"
BYTES: Final = 32
NAME: Final = "the file with this user's key"
HINT: Final = (
    "let XDG_RUNTIME_DIR or XDG_STATE_HOME name a folder that this user may write, or give both ends a folder with keys: "
    "LLMConfig(trust=...) or AIODATADIST_TRUST. In containers that have no home in common, mount such a folder into each"
)


def key_path(environment: Mapping[str, str]) -> Path:
    """Return the path of this user's key.

    ``XDG_RUNTIME_DIR`` counts only if it is this user's folder: after ``su`` it is another user's.

    Raises:
        ParamInvalid: if this user has no folder of these, and no home.
    """
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _is_own_folder(runtime):
        return runtime / FOLDER / FILE
    state = Path(environment.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / FOLDER / FILE
    return _home(environment) / ".local" / "state" / FOLDER / FILE


def _home(environment: Mapping[str, str]) -> Path:
    """Return this user's home: ``HOME``, or that of the user's account if ``HOME`` is empty or not an absolute path."""
    home = Path(environment.get("HOME", ""))
    with suppress(KeyError):
        home = home if home.is_absolute() else Path(pwd.getpwuid(os.geteuid()).pw_dir)
    if not home.is_absolute():
        why = f"user {os.geteuid()} has no home, and so no place for this user's key"
        raise ParamInvalid(why, hint=HINT)
    return home


def user_key(path: Path) -> bytes:
    """Return this user's key, and create it if there is none.

    Raises:
        ParamInvalid: if it cannot be created or read, is too short, or other users may read or write it.
    """
    try:
        if not path.exists():
            _create(path)
    except OSError as error:
        raise ParamInvalid(f"this user's key cannot be kept as {str(path)!r}: {explained(error)}", hint=HINT) from error
    check_folder(path.parent, "the folder of this user's key")
    text = read_secret(path, NAME, readable_by=stat.S_IRWXU).strip()
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) < BYTES:
        raise ParamInvalid(
            f"{NAME} {str(path)!r} has no key: must be {BYTES} bytes or more in hexadecimal",
            hint="remove the file while no cluster of this user runs: the next one creates it again",
        )
    return key


def _create(path: Path) -> None:
    """Create the key, unless another process does so first: then that one's key stays.

    The file gets its name when it is complete. A rename would replace the key of a process that was quicker, which may
    have read it already; a hard link does not. Raises OSError.
    """
    beside = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(BYTES).encode() + b"\n")
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
