"""EMS ContextCaching: KV blocks kept in a pool, so that later requests with the same prefix load them.

Read it from the ground up. ``pools`` has the contract of a pool, the embedded pool, and the pools over Redis and
Mooncake. ``identity`` says who a caller is and how its blocks are named, ``memory`` where its KV cache is, and
``transfer`` moves values between the two. ``block_index`` knows which blocks are in the pool; ``pool_guard`` and
``health_gate`` decide if the pool is used now. ``cache`` is the asyncio interface, and ``ems`` the interface of EMS,
for callers without an event loop.
"""

from aiodatadist._context_caching.cache import ContextCache
from aiodatadist._context_caching.errors import (
    EmsErrorCode,
    EmsException,
    EmsForkError,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
)
from aiodatadist._context_caching.health_gate import HealthGate, HealthRules
from aiodatadist._context_caching.identity.config import CcCacheConfig, CcConfig, CcConfig_v1, KVCacheType
from aiodatadist._context_caching.identity.names import PrimaryKey
from aiodatadist._context_caching.memory.kv_layout import LayerGroup
from aiodatadist._context_caching.memory.regions import KvBufferWrapper
from aiodatadist._context_caching.pools.contract import KVPool
from aiodatadist._context_caching.pools.embedded import MemoryPool
from aiodatadist._context_caching.pools.open import open_pool
from aiodatadist._context_caching.results import CcResult, CcStatus, Statistics
from aiodatadist._context_caching.transfer.handle import BlockTransfer as Transfer

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
