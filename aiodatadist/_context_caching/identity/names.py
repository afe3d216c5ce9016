"""Names of values. Everything that must not be confused is part of a name, so that a mismatch is a miss.

The namespace is a digest of the identity: tenant, model, engine, kind and degrees of parallelism, and the layout of the
registered cache. The hash of a block decides on which node it is stored. Shard and layer group are attributes of a
value, so that all shards of one block are on one node.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.identity.config import CcConfig, CcConfig_v1, KVCacheType
from aiodatadist._context_caching.pools.contract import PoolKey

VERSION: Final = 1
"""Version of the order of bytes inside a value."""
MAX_KEY: Final = 127
"""Most bytes of a key: both parts and their separator, in UTF-8."""
MAX_HASH: Final = 2**128
MIN_HASH: Final = -(2**63)
"""Hashes of up to 128 bits, or signed ones of 64 bits, as Python's ``hash()`` returns."""


@dataclass(frozen=True, order=True, slots=True)
class PrimaryKey:
    """A key of the caller's own (V0). Values of one ``distribute_key`` live on one node; both parts name the value.

    Raises:
        EmsInvalidArgument: if a part is empty or not a str, or the key has more than 127 bytes.
    """

    distribute_key: str
    attribute_key: str

    def __post_init__(self) -> None:
        _check_part(self.distribute_key, "distribute_key")
        _check_part(self.attribute_key, "attribute_key")
        nbytes = _nbytes(self.distribute_key) + 1 + _nbytes(self.attribute_key)
        if nbytes > MAX_KEY:
            raise EmsInvalidArgument(f"the key has {nbytes} bytes with its separator: must have at most {MAX_KEY}")


def _check_part(part: Any, name: str) -> None:
    if not isinstance(part, str):
        raise EmsInvalidArgument(f"{name} is of type {type(part).__name__}: must be a str")
    if not part:
        raise EmsInvalidArgument(f"{name} is empty: must have at least one character")


def _nbytes(part: str) -> int:
    try:
        return len(part.encode())
    except UnicodeEncodeError:
        raise EmsInvalidArgument(f"the key has {part!r}, which is not valid Unicode") from None


def parts_of(key: Any, name: str) -> tuple[str, str]:
    """Return both parts of a caller's key; the second part of a plain string is empty."""
    if isinstance(key, PrimaryKey):
        return key.distribute_key, key.attribute_key
    if not isinstance(key, str):
        raise EmsInvalidArgument(f"{name} is of type {type(key).__name__}: must be a PrimaryKey or a str")
    nbytes = _nbytes(key)
    if not 0 < nbytes <= MAX_KEY:
        raise EmsInvalidArgument(f"{name} has {nbytes} bytes: must have 1 to {MAX_KEY}")
    return key, ""


def check_hashes(hashes: Any) -> Sequence[int]:
    """Return the hashes as a list of int.

    Raises EmsInvalidArgument if they are not distinct whole numbers from -2**63 to 2**128 - 1, at least one.
    """
    listed = rules.some(hashes, "hashes")
    if set(map(type, listed)) != {int}:
        listed = [_whole(value, f"hashes[{i}]") for i, value in enumerate(listed)]
    if set(map(type, listed)) != {int} or min(listed) < MIN_HASH or max(listed) >= MAX_HASH:
        for i, value in enumerate(listed):
            rules.integer(value, f"hashes[{i}]", MIN_HASH, MAX_HASH - 1)
    rules.distinct(listed, "hashes")
    return listed


def check_groups(groups: Any) -> Sequence[int]:
    """Return the layer groups as a list. Raises EmsInvalidArgument if they are not distinct valid numbers."""
    listed = [rules.integer(g, f"groups[{i}]", 0, MAX_GROUPS - 1) for i, g in enumerate(rules.some(groups, "groups"))]
    rules.distinct(listed, "groups")
    return listed


def _whole(value: Any, name: str) -> Any:
    if isinstance(value, (bytes, bytearray)):
        raise EmsInvalidArgument(
            f"{name} is of type {type(value).__name__}: must be an int, for instance int.from_bytes(digest[:16])"
        )
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    return operator.index(value) if is_whole else value


class Shape(NamedTuple):
    """The part of a layout that names depend on: its digest and the number of its layer groups."""

    fingerprint: str
    groups: int

    def layout_record(self) -> bytes:
        """Return the ``LAYOUT_RECORD_BYTES`` bytes that record the layout in a pool."""
        return f"{self.fingerprint:32}{self.groups:08}".encode()

    @classmethod
    def from_layout_record(cls, record: bytes) -> Shape | None:
        """Return the layout of a record, or None if this library did not write it."""
        try:
            shape = cls(record[:32].decode("ascii"), int(record[32:]))
        except ValueError:
            return None
        return shape if 0 < shape.groups <= MAX_GROUPS else None


LAYOUT_RECORD_BYTES: Final = 40
MAX_GROUPS: Final = 4096
"""Most layer groups of a layout. A lookup makes a name for each group of a block."""
MAX_SPACES: Final = 256
"""Most namespaces of layouts that are kept, so that they need not be hashed again."""

_pool_key = partial(tuple.__new__, PoolKey)
"""Return the key made of a tuple of all fields; much faster than naming the fields."""


class Names:
    """The names that one rank uses."""

    def __init__(self, config: CcConfig, access_id: str | None) -> None:
        self._config = config
        c = config
        shared = [VERSION, access_id, c.model_id, c.tp_world_size, c.pp_world_size]
        if isinstance(c, CcConfig_v1):
            self._identity = [*shared, c.llm_engine, c.kvcache_type.value]
            self.shard: str = self._shard(c.rank_in_pp_group, c.rank_in_tp_group)
        self._own = _namespace("keys", shared)
        self._spaces: dict[str, str] = {}

    def _shard(self, pp: int, tp: int) -> str:
        """Return the name of a shard. With MLA all ranks of a tensor-parallel group share one."""
        config = self._config
        is_shared = isinstance(config, CcConfig_v1) and config.kvcache_type is KVCacheType.MLA
        return f"p{pp}t{'*' if is_shared else tp}"

    def shards(self) -> list[str]:
        """Return the shards of all ranks, each once."""
        config = self._config
        everyone = ((pp, tp) for pp in range(config.pp_world_size) for tp in range(config.tp_world_size))
        return list(dict.fromkeys(self._shard(pp, tp) for pp, tp in everyone))

    def of_key(self, parts: tuple[str, str]) -> PoolKey:
        """Return the pool's key for the caller's key."""
        return PoolKey(self._own, *parts)

    def of_blocks(self, blocks: Iterable[tuple[int, int]], shape: Shape, shard: str | None = None) -> list[PoolKey]:
        """Return the keys of the data of blocks, each given as ``(hash, layer group)``."""
        space = self._spaces.get(shape.fingerprint)
        if space is None:
            if len(self._spaces) >= MAX_SPACES:  # layouts are read from the pool, which may name a new one each time
                self._spaces.clear()
            space = self._spaces[shape.fingerprint] = _namespace("blocks", [*self._identity, shape.fingerprint])
        groups = [f"{shard or self.shard}g{group}" for group in range(shape.groups)]
        # a minus sign keeps -1 and 2**64 - 1 apart
        return [_pool_key((space, f"{value:x}", groups[group])) for value, group in blocks]

    def of_layout_record(self, shard: str) -> PoolKey:
        """Return the key of a rank's recorded layout, for processes that have hashes and no cache."""
        return PoolKey(_namespace("layouts", self._identity), "layout", shard)


def _namespace(kind: str, parts: Sequence[Any]) -> str:
    text = json.dumps([kind, *parts])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
