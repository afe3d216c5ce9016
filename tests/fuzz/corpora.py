"""The kept inputs of each reader: ``python -m tests.fuzz.corpora`` writes the examples, and leaves all others."""

from __future__ import annotations

from hashlib import sha256

from tests.fuzz.readers import CORPUS, READERS


def kept(name: str) -> list[bytes]:
    """Return the kept inputs of a reader."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def keep(name: str, data: bytes) -> None:
    """Keep an input, under its hash."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / sha256(data).hexdigest()[:16]).write_bytes(data)


def main() -> None:
    for name, reader in READERS.items():
        for data in reader.examples():
            keep(name, data)


if __name__ == "__main__":
    main()
