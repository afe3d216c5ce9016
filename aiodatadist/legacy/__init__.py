"""The v1 interface: LLM-DataDist's KvCacheManager mode and models on top of it, on the same engine, and awaitable.

``LLMDataDist`` is the cluster of the front door in another mode: roles are enforced, the owner writes, a pull by a
request's key consumes the key, and a link does one thing at a time. ``KvCacheManager`` moves caches; ``LLMModel`` runs
a user's ``ModelRunner`` over them. Calls that move bytes or wait are awaited, all others are plain.
"""

from aiodatadist.legacy.config import LLMConfig
from aiodatadist.legacy.datadist import LLMDataDist
from aiodatadist.legacy.kv_cache import KvCache
from aiodatadist.legacy.kv_cache_manager import KvCacheManager
from aiodatadist.legacy.model import LLMModel
from aiodatadist.legacy.model_config import ModelConfig
from aiodatadist.legacy.requests import CapacityState, LLMReq
from aiodatadist.legacy.runner import ModelRunner
from aiodatadist.legacy.tensor import Tensor, TensorDesc

__all__ = [
    "CapacityState",
    "KvCache",
    "KvCacheManager",
    "LLMConfig",
    "LLMDataDist",
    "LLMModel",
    "LLMReq",
    "ModelConfig",
    "ModelRunner",
    "Tensor",
    "TensorDesc",
]
