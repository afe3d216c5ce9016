"""Keys that seal values in pools: those of a file, or the lines for that purpose in a folder of trust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiodatadist._config.secret_files import check_folder, read_secret
from aiodatadist._config.trust import KEYS, NONE, VARIABLE, Key, KeysInFile, is_for_values, keys_of

FILE: Final = "the file of keys for values"
"""The name of such a file in errors."""


class SealKeys(KeysInFile):
    """The keys in a file with lines of ``name secret``.

    Args:
        is_folder: True if the path is that of a folder of trust. Then only keys with a name for values count.
    """

    def __init__(self, path: Path, *, is_folder: bool = False) -> None:
        super().__init__(path / KEYS if is_folder else path, FILE)
        self._folder = path if is_folder else None

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
