"""Configuration of a rank: the identity under which its values are stored, and the memory its cache may use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument

MIB: Final = 1 << 20
_ACCESS_ID: Final = re.compile(r"[0-9a-z._-]{1,512}")
_ACCESS_KEY: Final = re.compile(r"[0-9A-Za-z+/=]{32,256}")


class KVCacheType(Enum):
    """The way heads share keys and values. With ``MLA`` all ranks of a tensor-parallel group hold the same data."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True)
class CcConfig:
    """Identity of one rank whose callers bring their own keys (V0).

    Attributes:
        rank_id: global rank in the inference instance.
        device_id: this rank's device, among those that the process sees. It alone is not part of a value's identity.
        model_id: unique per model; 1 to 512 characters, no control characters.
        tp_world_size, pp_world_size: tensor and pipeline parallel degree.

    Raises:
        EmsInvalidArgument: if a field breaks its rule.
    """

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int = 1
    pp_world_size: int = 1

    def __post_init__(self) -> None:
        rules.integer(self.rank_id, "rank_id", 0)
        rules.integer(self.device_id, "device_id", 0)
        rules.text(self.model_id, "model_id", 1, 512)
        rules.integer(self.tp_world_size, "tp_world_size", 1)
        rules.integer(self.pp_world_size, "pp_world_size", 1)


@dataclass(frozen=True)
class CcConfig_v1(CcConfig):  # noqa: N801 - EMS's name
    """Identity of one rank whose keys are block hashes (V1). Callers give only the hash, so the rest is here.

    Attributes:
        rank_in_tp_group, rank_in_pp_group: the shard of each block that this rank has.
        llm_engine: free text that keeps engines apart.
        kvcache_type: with ``MLA`` there is one shard per tensor-parallel group.
    """

    rank_in_tp_group: int = 0
    rank_in_pp_group: int = 0
    llm_engine: str = "vllm"
    kvcache_type: KVCacheType = KVCacheType.GQA

    def __post_init__(self) -> None:
        super().__post_init__()
        rules.integer(self.rank_in_tp_group, "rank_in_tp_group", 0, self.tp_world_size - 1)
        rules.integer(self.rank_in_pp_group, "rank_in_pp_group", 0, self.pp_world_size - 1)
        rules.text(self.llm_engine, "llm_engine", 1, 512)
        if not isinstance(self.kvcache_type, KVCacheType):
            raise EmsInvalidArgument(f"kvcache_type is {self.kvcache_type!r}: must be a KVCacheType")


@dataclass(frozen=True)
class CcCacheConfig:
    """Limits on the host memory of a cache. Sizes are a number of bytes, or a text like ``"1GiB"``.

    Attributes:
        read_cache_bytes: size of the local read cache. By default 0, no read cache, because host memory is the user's.
        fill_on_read: if true, values read from the pool are copied into the local read cache, too.
        bytes_in_flight: host memory that all running calls together may hold. Calls that need more wait.
    """

    read_cache_bytes: int = 0
    fill_on_read: bool = True
    bytes_in_flight: int = 256 * MIB

    if TYPE_CHECKING:  # a type checker knows only what is kept

        def __init__(
            self, read_cache_bytes: int | str = 0, fill_on_read: bool = True, bytes_in_flight: int | str = 256 * MIB
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "read_cache_bytes", rules.size(self.read_cache_bytes, "read_cache_bytes", 0))
        rules.flag(self.fill_on_read, "fill_on_read")
        object.__setattr__(self, "bytes_in_flight", rules.size(self.bytes_in_flight, "bytes_in_flight", 1))


def check_access(access_id: str | None, access_key: str | None) -> None:
    """Raise EmsInvalidArgument if one of the two breaks its form. Neither is a secret: see SECURITY.md on tenants."""
    for value, name, form, rule in (
        (access_id, "access_id", _ACCESS_ID, "1 to 512 digits, lower-case letters, '.', '-' and '_'"),
        (access_key, "access_key", _ACCESS_KEY, "32 to 256 digits, letters, '+', '/' and '='"),
    ):
        if value is not None and (not isinstance(value, str) or not form.fullmatch(value)):
            shown = repr(value) if name == "access_id" else "not shown"
            raise EmsInvalidArgument(f"{name} ({shown}) must be {rule}")
