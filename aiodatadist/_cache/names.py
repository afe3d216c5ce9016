"""Names of caches and of their batch slots: the keys that callers use, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from aiodatadist._values.descriptors import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex


@dataclass(frozen=True, slots=True)
class AddressKey:
    """The key of a cache by an address in one of its tensors, as in upstream's ``TransferConfig``."""

    cluster_id: int
    address: int


Form: TypeAlias = tuple[str, *tuple[object, ...]]
"""The name of a call that moves bytes, and its other words besides caches, blocks and terms: layers, sizes, offsets."""

Key = BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex | AddressKey


class Name(NamedTuple):
    """The name of a cache or slot. Each ``kind`` has its own name space, so that ids of different kinds do not collide."""

    kind: Literal["blocks", "request", "prefix", "id", "address"]
    id: int
    model_id: int = 0


WHOLE_CACHE: Final = frozenset({"id", "address"})
"""The kinds of names that stand for a cache, and not for one slot that a key was bound to."""


def name_of(key: Key) -> Name:
    """Return the name by which the owner finds it. The batch index of an id is not part of the name."""
    if isinstance(key, BlocksCacheKey):
        return Name("blocks", 0, key.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return Name("id", key.cache_id)
    if isinstance(key, AddressKey):
        return Name("address", key.address)
    if key.is_prefix:
        return Name("prefix", key.prefix_id, key.model_id)
    return Name("request", key.req_id, key.model_id)
