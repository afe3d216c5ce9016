"""Options for clusters whose peers are made by hand, and folders of trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiodatadist._config.trust import AuthKey, Credential, Untrusted

HEX = "ab" * 32
"""A secret of a folder of trust."""


def proving(key: bytes | str | None) -> dict[str, Any]:
    """Return the options of a cluster with this key; of one to which any user may link if it is None."""
    return {"trust": "none"} if key is None else {"auth_key": key}


def having(key: bytes | None) -> Credential:
    """Return the credential of a key; the lack of one if it is None."""
    return Untrusted() if key is None else AuthKey(key)


def folder_of(path: Path, *lines: str, mode: int = 0o600) -> Path:
    """Make a folder of trust with these lines in its file of keys, or write them into it."""
    path.mkdir(mode=0o700, exist_ok=True)
    fresh = path / ".keys"
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    fresh.chmod(mode)
    fresh.rename(path / "keys")
    return path


def policy_in(folder: Path, content: Any) -> Path:
    """Write a policy into a folder of trust: JSON of an object, or a text as it is. Return the folder."""
    fresh = folder / ".policy"
    fresh.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.rename(folder / "policy.json")
    return folder
