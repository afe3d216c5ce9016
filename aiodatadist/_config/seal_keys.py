"""Keys that seal values in pools: those of a file, or the lines for that purpose in a folder of trust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiodatadist._config.secret_files import check_folder, read_secret, unreadable
from aiodatadist._config.trust import KEYS, NONE, VARIABLE, Credential, Key, is_for_values, keys_of, state_of

FILE: Final = "the file of keys for values"
"""The name of such a file in errors."""


class SealKeys(Credential):
    """The keys in a file with lines of ``name secret``, which is read again when it has changed.

    Args:
        is_folder: True if the path is that of a folder of trust. Then only keys with a name for values count.
    """

    def __init__(self, path: Path, *, is_folder: bool = False) -> None:
        self.path: Path = path / KEYS if is_folder else path
        self._folder = path if is_folder else None
        self._seen: tuple[int, ...] | None = None
        self._keys: tuple[Key, ...] = ()

    @property
    def is_in_file(self) -> bool:
        return True

    @property
    def may_change(self) -> bool:
        return True

    def current(self) -> tuple[Key, ...]:
        try:
            seen = state_of(self.path.stat())
        except (OSError, ValueError) as error:
            raise unreadable(self.path, FILE, error) from error
        if seen != self._seen:
            self._keys, self._seen = (), None
            self._keys = self._read()
            self._seen = seen
        return self._keys

    def _read(self) -> tuple[Key, ...]:
        if self._folder is not None:
            check_folder(self._folder, "the folder of trust")
        keys = keys_of(read_secret(self.path, FILE), self.path)
        return keys if self._folder is None else tuple(key for key in keys if is_for_values(key.name))


def seal_keys_of_trust(environment: Mapping[str, str] = os.environ) -> SealKeys | None:
    """Return the keys for values in the folder that ``AIODATADIST_TRUST`` names; None if it has none. It reads files.

    Raises:
        ParamInvalid: if the folder's keys cannot be used.
    """
    folder = environment.get(VARIABLE)
    if not folder or folder == NONE or not os.path.lexists(Path(folder) / KEYS):
        return None
    keys = SealKeys(Path(folder), is_folder=True)
    return keys if keys.current() else None
