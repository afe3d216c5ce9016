"""Seals that the thread of heartbeats makes: they are hashlib's."""

from __future__ import annotations

import errno
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._native.library import ffi, ring


def seal(key: bytes, data: bytes) -> bytes:
    out = ffi.new("uint8_t[16]")
    assert ring.blake2b_seal(key, len(key), data, len(data), out) == 0
    return bytes(out)


@given(st.binary(max_size=64), st.binary(max_size=400))
def test_a_seal_is_keyed_blake2b(key: bytes, data: bytes) -> None:
    assert seal(key, data) == blake2b(data, key=key, digest_size=16).digest()


def test_each_number_of_blocks_is_sealed_alike() -> None:
    for size in (0, 1, 8, 127, 128, 129, 255, 256, 257, 1024):
        data = bytes(number % 251 for number in range(size))
        for key in (b"", b"k", b"k" * 32, b"k" * 64):
            assert seal(key, data) == blake2b(data, key=key, digest_size=16).digest()


def test_a_key_that_is_too_long_is_refused() -> None:
    assert ring.blake2b_seal(b"k" * 65, 65, b"", 0, ffi.new("uint8_t[16]")) == -errno.EINVAL
