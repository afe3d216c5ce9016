"""Shapes of the caches that both sides have, and the options of their clusters."""

from __future__ import annotations

import random
from typing import Any

from aiodatadist import Cache, CacheDesc, DataType, LLMConfig, Placement, legacy
from aiodatadist._cli.chaos.profiles import Profile

LAYERS = 4
TENSORS = 2 * LAYERS
BLOCK = 32 << 10
"""Bytes of a block in one tensor."""
SOURCE = 32
"""Blocks of an owner's cache, or as many in batch slots."""
SLOTS = 8
PATCH = 16
"""Blocks that one task of the puller writes into, each between two that no transfer may touch."""
WIDE = 2 * PATCH + 1
"""Blocks of a patch, including those in between."""
LEASED = 16
USER = 17
"""Blocks of the memory that each side registers itself."""
LARGE_BLOCKS, LARGE_BLOCK, LARGE_TENSORS = 16, 4 << 20, 2
"""The shape of the cache for large pushes: 2 x 64 MiB."""
LARGE = LARGE_TENSORS * LARGE_BLOCKS * LARGE_BLOCK
POOL, HOST_POOL, LEGACY_POOL, EACH = 2 * LARGE, 8 << 20, 0, 48 << 20
"""Bytes of the pools, and bytes for each of the owner's clusters. A second large cache fits beside one that is withheld."""
WHOLE_LAYERS, WHOLE_BLOCK, STAMPED = 80, 24 << 10, 4
"""The shape of a cache of production size, and the number of the owner's stamped blocks: the others are never touched."""

(
    SOURCE_MODEL, INBOX_MODEL, KEPT_MODEL, LAYERS_MODEL, PULLED_MODEL, USER_MODEL, REQUEST_MODEL, LARGE_MODEL,
    WHOLE_MODEL,
) = range(9)  # fmt: skip
LIVES = 1_000_000
"""The most generations of caches in one life of the owner's process."""
PULLER, PULLER_DEVICE = 101, 7
"""The puller's cluster."""

LINK_MILLIS = 5000
MEETING = 2
"""Seconds in which the members of a communicator must arrive."""
TIMEOUT = 1000
"""The time limit of a transfer in milliseconds."""
HEARTBEAT, MISSES = 0.2, 4
LOST = HEARTBEAT * (MISSES + 1)
"""Seconds of silence after which a peer is lost."""


def desc(blocks: int, nbytes: int = BLOCK, tensors: int = TENSORS) -> CacheDesc:
    return CacheDesc(tensors, [blocks, nbytes], DataType.DT_UINT8)


def whole_desc(profile: Profile) -> CacheDesc:
    """Return the shape of a cache of production size, with room for a patch for each of the owner's clusters."""
    blocks = (profile.gib << 30) // (2 * WHOLE_LAYERS * WHOLE_BLOCK)
    return desc(max(blocks, profile.clusters * WIDE), WHOLE_BLOCK, 2 * WHOLE_LAYERS)


def whole_view(cache: Cache, blocks: int) -> Cache:
    """Return the first blocks of such a cache, as a cache for a ledger."""
    return Cache(cache.cache_id, desc(blocks, WHOLE_BLOCK, 2 * WHOLE_LAYERS), cache.tensor_addrs, True)


def pool(profile: Profile, least: int) -> dict[str, int]:
    """Return the option for a pool with room for everything."""
    whole = whole_desc(profile)
    more = whole.size * whole.num_tensors + EACH if profile.gib else 0
    return {"memory_size": least + EACH * max(2, profile.clusters) + more}


def large_desc() -> CacheDesc:
    return desc(LARGE_BLOCKS, LARGE_BLOCK, LARGE_TENSORS)


def user_desc(placement: Placement) -> CacheDesc:
    return CacheDesc(TENSORS, [USER, BLOCK], DataType.DT_UINT8, placement)


def user_slots() -> CacheDesc:
    return desc(SLOTS, 2 * BLOCK)


def config(profile: Profile, device: int, listen: str | None) -> LLMConfig:
    options: dict[str, Any] = {
        "device_id": device,
        "listen_ip_info": listen,
        "sync_kv_timeout": TIMEOUT,
        "mem_pool_cfg": pool(profile, POOL),
        "host_mem_pool_cfg": {"memory_size": HOST_POOL},
        "heartbeat_interval": HEARTBEAT,
        "heartbeat_misses": MISSES,
        "enable_remote_cache_accessible": profile.one_sided,
    }
    if profile.is_checked:
        options["transfer_checksum"] = True
    if profile.by_ranks:
        options["link_total_time"] = MEETING
    if profile.relinks:
        options["relink"] = {"duration": None, "wait": 0.5}
    return LLMConfig(**options)


def legacy_config(profile: Profile, device: int, listen: str | None) -> legacy.LLMConfig:
    return legacy.LLMConfig(
        device_id=device,
        listen_ip_info=listen,
        sync_kv_timeout=TIMEOUT,
        mem_pool_cfg=pool(profile, LEGACY_POOL),
        heartbeat_interval=HEARTBEAT,
        heartbeat_misses=MISSES,
    )


def some(chance: random.Random, among: range | list[int], most: int = PATCH) -> list[int]:
    """Return a random choice of blocks, usually few."""
    count = min(chance.choice((1, 1, 2, 4, 8, 16)), most, len(among))
    return chance.sample(among, count)


def some_layers(chance: random.Random) -> range | None:
    """Return a range of layers, or None for all of them, which is usual."""
    if chance.random() < 0.7:
        return None
    first = chance.randrange(LAYERS)
    return range(first, chance.randint(first + 1, LAYERS))


def tensors_of(layers: range | None) -> range | None:
    return None if layers is None else range(2 * layers.start, 2 * layers.stop)
