"""KV cache transfer for disaggregated LLM serving on Ascend NPUs, as ordinary awaitables.

Inner packages have an underscore. Read them from the ground up: ``errors`` is public; ``_values`` and ``_config`` are what
callers say; ``_device`` has bytes, ``_transport`` lets them travel, ``_wire`` is what two ends say to each other; ``_cache``
says what the bytes mean; ``_link`` is one peer, ``_cluster`` all of them, and ``_layered`` what travels layer by layer;
``_datadist`` and ``_cache_manager`` are the front door.

Beside this module, ``context_caching`` keeps KV in pools, ``blocking`` and ``legacy`` are the calls that wait, ``adapters``
are for serving engines, ``telemetry`` shows what is counted, and ``testing`` is for tests of services.
"""

from aiodatadist import _as_program  # noqa: F401 - first of all: Ctrl-C is quiet during the other imports
from aiodatadist._cache.pool import PoolUsage
from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager import BlockPool, CacheManager, TakenBlocks
from aiodatadist._cluster.link_changes import LinkChange, LinkChanges, LinkPhase
from aiodatadist._cluster.peer import Peer
from aiodatadist._config.llm_config import LLMConfig, PoolConfig, Quotas, RelinkPolicy
from aiodatadist._datadist import LLMDataDist, Statistics
from aiodatadist._device import TransferReport, empty, torch_empty
from aiodatadist._layered import LayerDone
from aiodatadist._layered.synchronizers import (
    AwaitableLayerSynchronizer,
    EventLayerSynchronizer,
    LayerSynchronizer,
    TorchNpuLayerSynchronizer,
)
from aiodatadist._link import BlockLease, LayerReceiver, LeaseEnd, LinkStatistics, Notification
from aiodatadist._values.cluster_info import LLMClusterInfo
from aiodatadist._values.descriptors import (
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
from aiodatadist._values.digests import prompt_digest
from aiodatadist._values.lease_ticket import LeaseTicket, new_lease_name
from aiodatadist._values.link_results import LinkResults
from aiodatadist._values.selection import BlockParts
from aiodatadist._values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist._values.transfer_priority import TransferPriority
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
    "Quotas",
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
