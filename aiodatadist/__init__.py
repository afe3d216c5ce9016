"""KV cache transfer for disaggregated LLM serving on Ascend NPUs, as ordinary awaitables.

Read from the ground up: ``errors``, ``values`` and ``config`` are values; ``device`` has bytes, ``transport`` lets
them travel, ``wire`` is what two ends say to each other, ``cache`` is what the bytes mean; ``link`` is one peer,
``cluster`` all of them, and ``layered`` what travels layer by layer; ``datadist`` and ``cache_manager`` are the front
door.

Beside it: ``context_caching`` keeps KV in pools, ``blocking`` and ``legacy`` are the calls that wait, ``adapters``
are for serving engines, ``telemetry`` shows what ``counting`` counts, and ``testing`` is for tests of services.
"""

from aiodatadist.cache.pool import PoolUsage
from aiodatadist.cache.task import CacheTask
from aiodatadist.cache_manager import BlockPool, CacheManager, TakenBlocks
from aiodatadist.cluster.link_changes import LinkChange, LinkChanges, LinkPhase
from aiodatadist.cluster.peer import Peer
from aiodatadist.config.llm_config import LLMConfig, PoolConfig, RelinkPolicy
from aiodatadist.datadist import LLMDataDist, Statistics
from aiodatadist.device import TransferReport, empty, torch_empty
from aiodatadist.errors import (
    AuthError,
    CacheNotFound,
    DataCorrupted,
    DeviceError,
    FeatureNotEnabled,
    ForkError,
    IncompatiblePeer,
    InternalError,
    LeaseMismatch,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    RuntimeUnavailable,
    StuckError,
    TransferError,
    TransferTimeout,
)
from aiodatadist.layered import LayerDone
from aiodatadist.layered.synchronizers import (
    AwaitableLayerSynchronizer,
    EventLayerSynchronizer,
    LayerSynchronizer,
    TorchNpuLayerSynchronizer,
)
from aiodatadist.link import BlockLease, LayerReceiver, LeaseEnd, LinkStatistics, Notification
from aiodatadist.values.cluster_info import LLMClusterInfo
from aiodatadist.values.descriptors import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    PushType,
    RegisterMemStatus,
    Status,
)
from aiodatadist.values.digests import prompt_digest
from aiodatadist.values.lease_ticket import LeaseTicket, new_lease_name
from aiodatadist.values.link_results import LinkResults
from aiodatadist.values.selection import BlockParts
from aiodatadist.values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist.values.transfer_priority import TransferPriority

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "AwaitableLayerSynchronizer",
    "BlockLease",
    "BlockParts",
    "BlockPool",
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheNotFound",
    "CacheTask",
    "DataCorrupted",
    "DataType",
    "DeviceError",
    "EventLayerSynchronizer",
    "FeatureNotEnabled",
    "ForkError",
    "IncompatiblePeer",
    "InternalError",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerDone",
    "LayerReceiver",
    "LayerSynchronizer",
    "LeaseEnd",
    "LeaseMismatch",
    "LeaseTicket",
    "LinkChange",
    "LinkChanges",
    "LinkClosed",
    "LinkError",
    "LinkPhase",
    "LinkResults",
    "LinkStatistics",
    "LinkTimeout",
    "MemInfo",
    "Memtype",
    "NotLinked",
    "Notification",
    "OutOfMemory",
    "ParamInvalid",
    "Peer",
    "PeerLost",
    "Placement",
    "PoolConfig",
    "PoolUsage",
    "ProtocolError",
    "PushType",
    "RegisterMemStatus",
    "RelinkPolicy",
    "RuntimeUnavailable",
    "Statistics",
    "Status",
    "StuckError",
    "TakenBlocks",
    "TorchNpuLayerSynchronizer",
    "TransferConfig",
    "TransferError",
    "TransferPriority",
    "TransferReport",
    "TransferTimeout",
    "TransferWithCacheKeyConfig",
    "__version__",
    "empty",
    "new_lease_name",
    "prompt_digest",
    "torch_empty",
]
