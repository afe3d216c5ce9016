"""The header of a value in memory that others share: proof that the value is complete, and the one that was asked for.

A header has 64 bytes: magic, version, a hash of the key, payload length, a checksum of the payload. Stale, foreign and
half-written values do not pass, and count as missing. Long payloads are hashed in a thread, without the GIL.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._context_caching.pools.contract import PoolKey, Stage, Value
from aiodatadist.errors import FeatureNotEnabled

_HEADER = struct.Struct("<8sIIQQQ24x")
_MAGIC = b"addvalue"
_VERSION = 1
ON_THE_LOOP = 256 << 10
"""Most bytes that are hashed on the event loop: that takes 30 us, less than handing them to a thread."""
THREADS = 2
"""Number of hashing threads."""

T = TypeVar("T")


class Wrapping(Protocol):
    """The form of payloads in a pool's memory.

    Attributes:
        nbytes: bytes in front of each payload.
    """

    nbytes: int

    async def seal(self, keys: Sequence[PoolKey], stages: Sequence[Stage]) -> None:
        """Complete the headers; the payloads are in place."""

    async def proven(self, keys: Sequence[PoolKey], values: Sequence[Value]) -> list[bool]:
        """Return for each value True if it is what was asked for."""

    def close(self) -> None:
        """Release the resources: nothing is wrapped after this."""


class Bare:
    """Memory of this process: payloads without headers."""

    nbytes = 0

    async def seal(self, keys: Sequence[PoolKey], stages: Sequence[Stage]) -> None:
        """Do nothing: there are no headers."""

    async def proven(self, keys: Sequence[PoolKey], values: Sequence[Value]) -> list[bool]:
        return [True] * len(values)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class Envelope:
    """A header in front of each payload."""

    nbytes = _HEADER.size

    def __init__(self) -> None:
        """Load the hash. Raises FeatureNotEnabled if xxhash is not installed."""
        try:
            self._hash: Any = importlib.import_module("xxhash").xxh3_64_intdigest
        except ImportError as problem:
            raise FeatureNotEnabled(
                "pools outside this process need the package xxhash, which is not installed", hint="pip install xxhash"
            ) from problem
        self._threads = ThreadPoolExecutor(THREADS, "aiodatadist checksums")

    async def seal(self, keys: Sequence[PoolKey], stages: Sequence[Stage]) -> None:
        await self._apart(self._seal_all, keys, stages)

    async def proven(self, keys: Sequence[PoolKey], values: Sequence[Value]) -> list[bool]:
        return await self._apart(self._prove_all, keys, values)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    async def _apart(self, work: Callable[[Sequence[PoolKey], Any], T], keys: Sequence[PoolKey], memory: Any) -> T:
        """Do the work in a thread if it is long. If cancelled, it has ended when this returns."""
        if sum(each.nbytes for each in memory) <= ON_THE_LOOP:
            return work(keys, memory)
        return await in_thread(work, keys, memory, threads=self._threads)

    def _seal_all(self, keys: Sequence[PoolKey], stages: Sequence[Stage]) -> None:
        for key, stage in zip(keys, stages, strict=True):
            with stage.view() as view, view[self.nbytes :] as payload:
                _HEADER.pack_into(view, 0, *self._fields(key, payload))

    def _prove_all(self, keys: Sequence[PoolKey], values: Sequence[Value]) -> list[bool]:
        return [self._is_proven(key, value) for key, value in zip(keys, values, strict=True)]

    def _is_proven(self, key: PoolKey, value: Value) -> bool:
        with value.view() as view, view[self.nbytes :] as payload:
            found = _HEADER.unpack_from(view)
            return found[:5] == (*self._name(key), len(payload)) and found == self._fields(key, payload)

    def _name(self, key: PoolKey) -> tuple[bytes, int, int, int]:
        return _MAGIC, _VERSION, 0, self._hash("\0".join(key).encode())

    def _fields(self, key: PoolKey, payload: memoryview) -> tuple[bytes, int, int, int, int, int]:
        return *self._name(key), len(payload), self._hash(payload)
