"""Files that hold secrets. A file that other users may change or read is refused, with the rule that it breaks."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from aiodatadist.errors import ParamInvalid, explained

MAX_FILE: Final = 64 << 10
"""The most bytes of a file with secrets."""
_ROOT: Final = 0


def read_secret(path: Path, name: str, *, readable_by: int = stat.S_IRWXU | stat.S_IRGRP) -> bytes:
    """Return the content of a file that only its owner, or root, can have written.

    The checks and the reading concern one open file, so it cannot be exchanged between them.

    Args:
        name: names the file in errors, in front of its path.
        readable_by: mode bits of those who may read it. A group may by default, because Kubernetes mounts Secrets so.

    Raises:
        ParamInvalid: if the file cannot be read, is not a regular file, is larger than ``MAX_FILE``, or other users may
            write or read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    except (OSError, ValueError) as error:
        raise unreadable(path, name, error) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ParamInvalid(f"{name} {str(path)!r} is not a regular file: must be one")
        _check_writers(path, name, status, descriptor)
        if stat.S_IMODE(status.st_mode) & stat.S_IRWXO & ~readable_by:
            raise _wrong_mode(path, name, status, "users outside its group must not be able to read it", "0400")
        if stat.S_IMODE(status.st_mode) & stat.S_IRGRP & ~readable_by:
            raise _wrong_mode(path, name, status, "its group must not be able to read it", "0600")
        try:
            content = file.read(MAX_FILE + 1)
        except OSError as error:
            raise unreadable(path, name, error) from error
    if len(content) > MAX_FILE:
        raise ParamInvalid(f"{name} {str(path)!r} has more than {MAX_FILE} bytes: must have at most that many")
    return content


def read_key(path: Path, name: str) -> bytes:
    """Return the key that is the whole content of a file, without spaces and line ends around it.

    Raises:
        ParamInvalid: as :func:`read_secret`, and if the file is empty.
    """
    key = read_secret(path, name).strip()
    if not key:
        raise ParamInvalid(f"{name} {str(path)!r} is empty: must contain the key")
    return key


def check_folder(path: Path, name: str) -> None:
    """Check that only this user and root can write a folder, or that it lies on a read-only mount.

    Kubernetes mounts a Secret read-only, as a folder whose mode lets all users write.

    Raises:
        ParamInvalid: if others may write it, it belongs to another user, or it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise unreadable(path, name, error) from error
    try:
        _check_writers(path, name, os.fstat(descriptor), descriptor)
    finally:
        os.close(descriptor)


def _check_writers(path: Path, name: str, status: os.stat_result, descriptor: int) -> None:
    """Check who can write what is open, as :func:`check_folder` does.

    The path is for errors only: meanwhile another user may have put something else there.
    """
    is_shared = bool(stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH))
    is_foreign = status.st_uid not in {_ROOT, os.geteuid()}
    if not (is_shared or is_foreign) or is_read_only(descriptor):
        return
    if is_foreign:
        raise ParamInvalid(
            f"{name} {str(path)!r} belongs to user {status.st_uid}: must belong to user {os.geteuid()}, or root",
            hint="its owner could change it at any time",
        )
    mode = "0700" if stat.S_ISDIR(status.st_mode) else "0600"
    raise _wrong_mode(path, name, status, "group and others must not be able to write it", mode)


def unreadable(path: Path, name: str, error: OSError | ValueError, hint: str | None = None) -> ParamInvalid:
    """Return the error for a file that cannot be read, or for a path that can be no file's, as with a null byte."""
    why = explained(error) if isinstance(error, OSError) else error
    return ParamInvalid(f"{name} {str(path)!r} cannot be read: {why}", hint=hint)


def _wrong_mode(path: Path, name: str, status: os.stat_result, rule: str, mode: str) -> ParamInvalid:
    has = f"{stat.S_IMODE(status.st_mode):04o}"
    return ParamInvalid(f"{name} {str(path)!r} has mode {has}: {rule}", hint=f"chmod {mode} {path}")


def is_read_only(descriptor: int) -> bool:
    """Return True if an open file or folder lies on a mount on which nothing can be written."""
    try:
        return bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
    except OSError:
        return False
