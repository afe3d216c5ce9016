"""The memory that an engine has registered, by handle and by address."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from aiodatadist._hixl.values import MemDesc, MemType
from aiodatadist._values.descriptors import CacheDesc, DataType, Placement
from aiodatadist._values.spans import Spans
from aiodatadist.errors import CacheNotFound, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._hixl.cluster import Ranges

_UINT64 = 1 << 64


class RegisteredMemory:
    """The registered ranges of one engine. None overlaps another."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._spans: Spans[Entry] = Spans()
        self._handles: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._handles)

    async def register(self, mem: Any, kind: Any) -> int:
        """Register a range, and return its handle, which is above 0. The same range again has the same handle.

        Raises:
            TypeError: if an argument is of another type.
            ParamInvalid: if the address is 0, there are no bytes, they leave the address space, or overlap another range.
            LLMException: if the transport refused the memory. Nothing was registered.
        """
        if not isinstance(mem, MemDesc):
            raise TypeError(f"mem is {mem!r}: must be a MemDesc")
        if not isinstance(kind, MemType):
            raise TypeError(f"type is {kind!r}: must be a MemType")
        address, nbytes = mem.addr, mem.len
        if not address or not nbytes or address + nbytes > _UINT64:
            raise ParamInvalid(f"{mem}: must have an address above 0, a byte at least, and stay in the address space")
        other = self._spans.overlapped(address, nbytes)
        if other is not None:
            if (other.addresses[0], other.nbytes, other.placement) == (address, nbytes, kind.placement):
                return other.cache_id
            raise ParamInvalid(
                f"{mem} overlaps {other.nbytes} bytes at {other.addresses[0]:#x}, which are registered: ranges must be equal "
                "or apart"
            )
        desc = CacheDesc(1, [1, nbytes], DataType.DT_UINT8, kind.placement)
        cache = await self._ranges.register_cache(desc, [address], remote_accessible=True)
        entry = self._ranges.engine.registry.local(cache, "mem")
        self._handles[cache.cache_id] = entry
        self._spans.add(address, nbytes, entry)
        return cache.cache_id

    async def deregister(self, handle: Any) -> None:
        """Release a range. An unknown handle has no effect.

        Raises:
            TypeError: if the handle is not an integer.
            ParamInvalid: if it is 0.
            LLMException: with ``LLM_EXIST_LINK`` while peers may reach the range over a connection of either end.
        """
        if not isinstance(handle, int):
            raise TypeError(f"handle is {handle!r} of type {type(handle).__name__}: must be an int")
        if not handle:
            raise ParamInvalid("handle is 0: a handle of register_mem is above 0")
        entry = self._handles.get(handle)
        if entry is not None:
            await self._ranges.unregister_cache(handle)
            if self._handles.pop(handle, None) is not None:
                self._spans.remove(entry.addresses[0])

    def covering(self, addresses: array[int], lengths: array[int]) -> tuple[tuple[Entry, ...], list[int]]:
        """Return the ranges that contain these bytes, each once, and the numbers of those that none contains.

        Raises:
            CacheNotFound: if the device, or a peer that was stopped while it wrote, may still touch one.
        """
        if not self._handles:
            return (), list(range(len(addresses)))
        found, missing = self._spans.covering(addresses, lengths)
        for entry in found:
            if not entry.is_usable:
                raise CacheNotFound(
                    f"{entry.nbytes} bytes at {entry.addresses[0]:#x} cannot be used: they are being released, or the device "
                    "or a lost peer has not let go of them"
                )
        return tuple(found), missing

    def has_device_memory(self, entries: tuple[Entry, ...]) -> bool:
        """Return True if one of these ranges is memory of the device."""
        return any(entry.placement is Placement.DEVICE for entry in entries)
