"""What a cache, or a batch slot of one, is called: the keys that callers use, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from aiodatadist.values.descriptors import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex


@dataclass(frozen=True, slots=True)
class AddressKey:
    """Names a cache by an address in one of its tensors, as upstream's ``TransferConfig`` does."""

    cluster_id: int
    address: int


Key = BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex | AddressKey


class Name(NamedTuple):
    """``kind`` is a name space of its own: ids of requests and of prefixes do not meet."""

    kind: Literal["blocks", "request", "prefix", "id", "address"]
    id: int
    model_id: int = 0


def name_of(key: Key) -> Name:
    """The name under which the owner finds it. The batch index of an id is not part of it."""
    if isinstance(key, BlocksCacheKey):
        return Name("blocks", 0, key.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return Name("id", key.cache_id)
    if isinstance(key, AddressKey):
        return Name("address", key.address)
    if key.is_prefix:
        return Name("prefix", key.prefix_id, key.model_id)
    return Name("request", key.req_id, key.model_id)
