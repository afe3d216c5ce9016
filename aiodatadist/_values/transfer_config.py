"""The destinations of a layered transfer: one object per destination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodatadist._values import checks
from aiodatadist._values.descriptors import BlocksCacheKey, CacheKeyByIdAndIndex
from aiodatadist.errors import ParamInvalid


def check_range(value: Any, name: str) -> range | None:
    """Return the range; None is all layers.

    Raises TypeError or ParamInvalid if it is not a range with step 1 and 0 <= start < stop.
    """
    if value is None:
        return None
    checks.instance(value, name, range)
    if value.step != 1 or value.start < 0 or value.stop <= value.start:
        raise ParamInvalid(f"{name} is {value}: must have step 1 and 0 <= start < stop")
    return range(value.start, value.stop)


class _Destination:
    """The base of both kinds. ``src_layer_range`` are the layers of the source; all if None.

    With a key, ``dst_cluster_id`` is the key's; it can be set for compatibility.
    """

    @property
    def dst_cluster_id(self) -> int:
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        self._dst_cluster_id = checks.integer(dst_cluster_id, "dst_cluster_id", checks.UINT64)

    @property
    def src_layer_range(self) -> range | None:
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range | None) -> None:
        self._src_layer_range = check_range(src_layer_range, "src_layer_range")


class TransferConfig(_Destination):
    """A destination by addresses, for the request/response mode.

    Args:
        dst_cluster_id: the peer.
        dst_addrs: for each layer of the range, the addresses of its tensors at the peer, in order.
            An address names memory, not a cache: the peer must keep the cache there until the transfer has ended.
        src_layer_range: layers of the source; all if None.
        src_batch_index: batch slot of a contiguous source.

    Raises TypeError, ValueError or ParamInvalid if an argument is wrong. So does setting a property.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index

    @property
    def dst_addrs(self) -> Sequence[int]:
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Sequence[int]) -> None:
        checks.sequence(dst_addrs, "dst_addrs", int)
        for i, address in enumerate(dst_addrs):
            checks.integer(address, f"dst_addrs[{i}]", checks.UINT64)
        self._dst_addrs = dst_addrs

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        self._src_batch_index = checks.integer(src_batch_index, "src_batch_index", checks.UINT32)


class TransferWithCacheKeyConfig(_Destination):
    """A destination by the key of the peer's cache, for the one-sided mode.

    Args:
        cache_key: a blocks cache, or a batch slot by id.
        src_layer_range, dst_layer_range: layers of the source, and the layers of the destination to which they go. If
            None, all layers of that cache, which upstream refuses. Both must have the same length: source layer ``first
            + i`` goes to destination layer ``first' + i``. Whatever depends on the caches is checked once they are
            known: the transfer is refused, or its destination fails, before a byte moves.
        src_batch_index: batch slot of a contiguous source; 0 with a :class:`BlocksCacheKey`.

    Raises TypeError, ValueError or ParamInvalid if an argument is wrong. So does setting a property.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        self.dst_cluster_id: int = cache_key.cluster_id
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        if src_layer_range is not None and dst_layer_range is not None and len(src_layer_range) != len(dst_layer_range):
            raise ParamInvalid(
                f"src_layer_range {src_layer_range} and dst_layer_range {dst_layer_range}: they must have the same length"
            )
        self.src_batch_index = src_batch_index

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        checks.instance(cache_key, "cache_key", (BlocksCacheKey, CacheKeyByIdAndIndex))
        self._cache_key = cache_key

    @property
    def dst_layer_range(self) -> range | None:
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: range | None) -> None:
        self._dst_layer_range = check_range(dst_layer_range, "dst_layer_range")

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        checks.integer(src_batch_index, "src_batch_index", checks.UINT32)
        if src_batch_index and isinstance(self._cache_key, BlocksCacheKey):
            raise ParamInvalid(f"src_batch_index is {src_batch_index}: must be 0 with a BlocksCacheKey")
        self._src_batch_index = src_batch_index
