"""The seals of values: AES-256-GCM with a key that all members of a group have.

A sealed value has a header of 64 bytes: magic, the key's id, the time, a nonce, and the tag. The time, the length and the
value's full name are part of what the tag proves, so a value cannot be opened if a stranger wrote it, or if it was
changed, cut, or copied under another name.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import importlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from aiodatadist._config.trust import Key
from aiodatadist._context_caching.pools.contract import GetStatus, PoolKey
from aiodatadist._context_caching.pools.extras import how_to_install

MAGIC: Final = b"addseal1"
_PROVED: Final = struct.Struct("<8s8sQ12s12x")
"""The part of the header that the tag proves: magic, id of the key, time and nonce."""
_TAG: Final = 16
HEADER: Final = _PROVED.size + _TAG
NONCE: Final = 12
ID: Final = 8
_LENGTHS: Final = struct.Struct("<QIII")

Clock = Callable[[], float]


class SealKey(NamedTuple):
    """A key of a group for values. ``id`` tells keys apart without showing anything of them."""

    id: bytes
    secret: bytes

    @classmethod
    def of(cls, key: Key) -> SealKey:
        """Return the key for values that belongs to a key of a file; links never use the same bytes."""
        secret = hmac.new(key.secret, b"aiodatadist sealed values", hashlib.sha256).digest()
        return cls(hmac.new(secret, b"id", hashlib.sha256).digest()[:ID], secret)

    def __repr__(self) -> str:
        return f"<SealKey {self.id.hex()}>"


class Seals:
    """Seals and opens values. Any thread may do so; for large values the interpreter lock is released.

    Args:
        seconds: age up to which a value is used; None: any age.

    Raises:
        ImportError: if ``cryptography`` is not installed.
    """

    def __init__(self, seconds: float | None = None, clock: Clock = time.time) -> None:
        try:
            ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
            self._invalid_tag: Any = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError as missing:
            raise ImportError(
                f"sealed values need the package cryptography ({missing}): {how_to_install('sealed')}",
                name=missing.name,
            ) from missing
        self._cipher: Any = ciphers.Cipher
        self._aes: Any = ciphers.algorithms.AES
        self._gcm: Any = ciphers.modes.GCM
        self._seconds = seconds
        self._clock = clock

    def seal(self, key: SealKey, name: PoolKey, view: memoryview) -> None:
        """Encrypt a value in place, and complete the header in front of it."""
        nonce = os.urandom(NONCE)
        _PROVED.pack_into(view, 0, MAGIC, key.id, int(self._clock()), nonce)
        with view[HEADER:] as payload:
            sealing = self._cipher(self._aes(key.secret), self._gcm(nonce)).encryptor()
            sealing.authenticate_additional_data(_proved(view, name, len(payload)))
            sealing.update_into(payload, payload)
            sealing.finalize()
        view[_PROVED.size : HEADER] = sealing.tag

    def open(self, keys: Sequence[SealKey], name: PoolKey, header: bytes, payload: memoryview) -> GetStatus | None:
        """Decrypt a value in place; return why it must not be used, or None if it may.

        If it must not be used, the contents of ``payload`` are undefined.

        Args:
            header: a copy of the value's first ``HEADER`` bytes.
            payload: the bytes behind it, in memory that no other writer of the pool reaches.
        """
        magic, key_id, at, nonce = _PROVED.unpack_from(header)
        key = next((each for each in keys if each.id == key_id), None)
        if magic != MAGIC or key is None:
            return GetStatus.FORGED
        opening = self._cipher(self._aes(key.secret), self._gcm(nonce, header[_PROVED.size :])).decryptor()
        opening.authenticate_additional_data(_proved(header, name, len(payload)))
        opening.update_into(payload, payload)
        try:
            opening.finalize()
        except self._invalid_tag:
            return GetStatus.FORGED
        is_old = self._seconds is not None and abs(self._clock() - at) > self._seconds
        return GetStatus.EXPIRED if is_old else None


def _proved(view: memoryview | bytes, name: PoolKey, nbytes: int) -> bytes:
    """Return what the tag proves beside the value: the header, the value's length, and its name."""
    parts = [part.encode() for part in name]
    return bytes(view[: _PROVED.size]) + _LENGTHS.pack(nbytes, *map(len, parts)) + b"".join(parts)


def writable(address: int, nbytes: int) -> memoryview:
    """Return that memory as a writable view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
