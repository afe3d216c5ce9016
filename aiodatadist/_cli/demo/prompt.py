"""The text that the demo reads, cut to a length."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from aiodatadist._cli.kit.errors import wrong_input

LIMIT = 4096
"""Bytes of prompt: 64 MiB of KV cache and about three seconds of prefill on one core; attention grows as the square."""

CHECKOUT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Prompt:
    """The bytes the model reads, where they came from, and how many there are; more than ``LIMIT`` are cut."""

    name: str
    text: bytes
    total: int
    is_total_known: bool = True

    def describe(self) -> str:
        """Return one readable line, which mentions the truncation if there was one."""
        if len(self.text) < self.total:
            of_all = f" of {self.total}" if self.is_total_known else ""
            return f"{self.name}, the first {len(self.text)}{of_all} bytes (the demo reads no more)"
        return f"{self.name}, {self.total} bytes"


def load_prompt(path: Path | None) -> Prompt:
    """Read ``path``, or the project's own description if it is None.

    Raises:
        CommandError: if the file is missing, unreadable or empty.
    """
    if path is None:
        return _own_readme()
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT + 1)
            size = os.fstat(file.fileno()).st_size  # 0 for a pipe
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise wrong_input(f"cannot read the prompt {path}: {reason}; give another with --prompt FILE") from error
    return _checked(str(path), text, max(size, len(text)), is_total_known=size > 0)


def _own_readme() -> Prompt:
    """Return the README of the checkout if this is one, else the long description that was installed with the package."""
    readme = CHECKOUT / "README.md"
    is_checkout = (CHECKOUT / "pyproject.toml").is_file() and readme.is_file()
    text = readme.read_bytes() if is_checkout else installed_description()
    return _checked("README.md", text, len(text))


def installed_description() -> bytes:
    try:
        description = metadata.metadata("aiodatadist").json.get("description", "")
    except metadata.PackageNotFoundError:
        return b""
    return str(description).encode()


def _checked(name: str, text: bytes, total: int, *, is_total_known: bool = True) -> Prompt:
    if not text:
        raise wrong_input(f"the prompt {name} is empty: the model needs at least one byte; give one with --prompt FILE")
    return Prompt(name, text[:LIMIT], total, is_total_known)


def shown(text: str) -> str:
    """Return text as one line that is safe on any terminal: printable ASCII as it is, everything else escaped."""
    return text.encode("unicode_escape").decode("ascii")
