"""Small changes of inputs, always the same for a seed: what is tried where there is no fuzzer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

BYTES = (0, 1, 0x7F, 0x80, 0xFF, *b'{}[]",:0-9.eE\\ \r\n')
WORDS = (
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"-1",
    b"18446744073709551616",
    b"1e999",
    b"\\u0000",
    b"\xff\xfe",
    b"$",
    b"\r\n",
)


def mutated(inputs: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """Yield changed inputs: each with one to four changes, or two that are put together."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(inputs))
        for _ in range(rng.randint(1, 4)):
            _change(rng, data, inputs)
        yield bytes(data)


def _change(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    at = rng.randint(0, len(data))
    end = min(len(data), at + rng.choice((1, 2, 4, 16, 64)))
    match rng.randrange(6):
        case 0:
            data[at:end] = b""
        case 1:
            data[at:at] = rng.choice(WORDS)
        case 2:
            data[at:end] = bytes(rng.choice(BYTES) for _ in range(end - at))
        case 3:
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
        case 4:
            other = rng.choice(inputs)
            data[at:] = other[rng.randint(0, len(other)) :]
        case _:
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
