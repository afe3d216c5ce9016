"""LLM-DataDist, v2 and v1, for code that does not await: the names, parameters and exceptions of ``llm_datadist``.

The engine is the awaitable one, on an event loop in a thread that the first ``LLMDataDist.init`` starts and the last
``finalize`` ends. Upstream's calls wait. For busy loops there are calls that do not::

    handle = manager.submit_pull_blocks(BlocksCacheKey(1), cache, [3, 9], [0, 1], tag=request)
    for ended in manager.drain():
        finish(ended.tag, ended.failed_blocks())

``python -m aiodatadist.blocking run script.py`` runs a script that imports ``llm_datadist``, unchanged.

Warnings are one line each on stderr, unless the script configured logging.
"""

from aiodatadist._blocking.block_lease import BlockLease
from aiodatadist._blocking.cache_manager import CacheManager
from aiodatadist._blocking.cache_task import CacheTask
from aiodatadist._blocking.config import LLMConfig, LlmConfig
from aiodatadist._blocking.datadist import LLMDataDist
from aiodatadist._blocking.kv_cache_manager import KvCacheManager
from aiodatadist._blocking.last_resort import install as _show_warnings
from aiodatadist._blocking.layers import LayerReceiver, LayersHandle, LayerSynchronizer
from aiodatadist._blocking.model import LLMModel
from aiodatadist._blocking.stats import Stats
from aiodatadist._blocking.submitted import Handle, HandleState, QueueFull
from aiodatadist._link.control.block_leases import LeaseEnd
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
from aiodatadist._values.lease_ticket import LeaseTicket
from aiodatadist._values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import LLMException, LLMStatusCode
from aiodatadist.legacy import CapacityState, KvCache, LLMReq, ModelConfig, ModelRunner, Tensor, TensorDesc

_show_warnings()

__all__ = [
    "BlockLease",
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "CapacityState",
    "DataType",
    "Handle",
    "HandleState",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMModel",
    "LLMReq",
    "LLMRole",
    "LLMStatusCode",
    "LayerReceiver",
    "LayerSynchronizer",
    "LayersHandle",
    "LeaseEnd",
    "LeaseTicket",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "ModelConfig",
    "ModelRunner",
    "Placement",
    "PushType",
    "QueueFull",
    "RegisterMemStatus",
    "Stats",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferPriority",
    "TransferWithCacheKeyConfig",
]
