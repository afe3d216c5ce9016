"""EMS ContextCaching: KV blocks kept in a pool, so that a later request with the same prefix loads what it would compute.

Read from the ground up: ``pools`` has the contract of what keeps values, the embedded pool, and Redis and Mooncake;
``identity`` says who a caller is and what a block is called, ``memory`` where its KV cache is, and ``transfer`` moves values
between the two. ``block_index`` knows what is there, ``pool_guard`` and ``health_gate`` whether it is used now, and
``life`` opens and closes; ``cache`` is the asyncio interface, ``ems`` the one of EMS, for callers without an event loop.
"""

from aiodatadist.context_caching.cache import ContextCache
from aiodatadist.context_caching.errors import (
    EmsErrorCode,
    EmsException,
    EmsForkError,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
)
from aiodatadist.context_caching.health_gate import HealthGate, HealthRules
from aiodatadist.context_caching.identity.config import CcCacheConfig, CcConfig, CcConfig_v1, KVCacheType
from aiodatadist.context_caching.identity.names import PrimaryKey
from aiodatadist.context_caching.memory.kv_layout import LayerGroup
from aiodatadist.context_caching.memory.regions import KvBufferWrapper
from aiodatadist.context_caching.pools.contract import KVPool
from aiodatadist.context_caching.pools.embedded import MemoryPool
from aiodatadist.context_caching.pools.open import open_pool
from aiodatadist.context_caching.results import CcResult, CcStatus, Statistics
from aiodatadist.context_caching.transfer.handle import BlockTransfer as Transfer

__all__ = [
    "CcCacheConfig",
    "CcConfig",
    "CcConfig_v1",
    "CcResult",
    "CcStatus",
    "ContextCache",
    "EmsErrorCode",
    "EmsException",
    "EmsForkError",
    "EmsInternalError",
    "EmsInvalidArgument",
    "EmsIoError",
    "EmsTimeout",
    "HealthGate",
    "HealthRules",
    "KVCacheType",
    "KVPool",
    "KvBufferWrapper",
    "LayerGroup",
    "MemoryPool",
    "PrimaryKey",
    "Statistics",
    "Transfer",
    "open_pool",
]
