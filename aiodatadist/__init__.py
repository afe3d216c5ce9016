"""KV cache transfer for disaggregated LLM serving on Ascend NPUs, as ordinary awaitables.

Read from the ground up: ``errors``, ``descriptors``, ``config`` and ``layout`` are values; ``device`` has bytes,
``transport`` lets them travel, ``wire`` is what two ends say to each other, ``cache`` is what the bytes mean; ``link`` is one
peer, ``engine`` all of them; ``datadist`` and ``cache_manager`` are the front door.
"""

import logging

from aiodatadist.cache.task import CacheTask, TransferReport
from aiodatadist.cache_manager import CacheManager
from aiodatadist.cluster_info import LLMClusterInfo
from aiodatadist.config import LLMConfig
from aiodatadist.datadist import LLMDataDist
from aiodatadist.descriptors import (
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
    RegisterMemStatus,
    Status,
)
from aiodatadist.errors import (
    AuthError,
    CacheNotFound,
    DeviceError,
    FeatureNotEnabled,
    ForkError,
    IncompatiblePeer,
    InternalError,
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

LlmConfig = LLMConfig

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "AuthError",
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheNotFound",
    "CacheTask",
    "DataType",
    "DeviceError",
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
    "LinkClosed",
    "LinkError",
    "LinkTimeout",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "NotLinked",
    "OutOfMemory",
    "ParamInvalid",
    "PeerLost",
    "Placement",
    "ProtocolError",
    "RegisterMemStatus",
    "RuntimeUnavailable",
    "Status",
    "StuckError",
    "TransferError",
    "TransferReport",
    "TransferTimeout",
    "__version__",
]
