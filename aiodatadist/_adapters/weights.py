"""A digest of a model's weights, from samples of their files. Two engines with different weights have different digests.

Reading all weights would take minutes. Training changes a tensor nearly everywhere, so a few bytes of each tensor are
enough. A file's name is not trusted: a file that cannot be read as its name says is sampled evenly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

KINDS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""Suffixes of files that hold weights."""
SAMPLES = 4096
"""Most samples of all files together: on a slow network file system, a second or two."""
SAMPLE_BYTES = 64
MAX_HEADER = 100 << 20
"""Most bytes of a safetensors header, as in that format."""


def digest_of_weights(place: str) -> str | None:
    """Return a digest of the weights in a folder or a file; None if there are none, or they cannot be read."""
    try:
        path = Path(place).expanduser()
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in KINDS)
        if not files:
            return None
        made = blake2b(digest_size=8, person=b"adist weights")
        for file in files:
            made.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\0".encode(errors="surrogatepass"))
            with file.open("rb") as opened:
                for sample in samples(opened, file.stat().st_size, max(1, SAMPLES // len(files))):
                    made.update(sample)
    except (OSError, ValueError, RuntimeError) as error:  # no path of a file, as a name from a hub may be; no such user
        logger.debug("the weights in %s cannot be read: %s", place, error)
        return None
    return made.hexdigest()


def samples(file: BinaryIO, size: int, count: int) -> Iterator[bytes]:
    """Yield at most ``count`` samples: of each tensor if the file says where they are, otherwise evenly."""
    offsets = _tensors(file, size) or [size * number // count for number in range(count)]
    step = -(-len(offsets) // count)
    for offset in offsets[::step]:
        file.seek(offset)
        yield file.read(SAMPLE_BYTES)


def _tensors(file: BinaryIO, size: int) -> list[int]:
    """Return where the tensors of a safetensors file begin, in order; nothing if it is another kind of file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MAX_HEADER, size - 8):
        return []
    try:
        header = json.loads(file.read(length))
        begins = [entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]
        return sorted(8 + length + begin for begin in begins if 0 <= begin < size)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
