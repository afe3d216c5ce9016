"""The v1 interface: LLM-DataDist's KvCacheManager mode and models on top of it, on the same engine, and awaitable.

``LLMDataDist`` is the cluster of the front door in another mode: roles are enforced, the owner writes, a pull by a
request's key consumes the key, and a link does one thing at a time. ``KvCacheManager`` moves caches; ``LLMModel`` runs
a user's ``ModelRunner`` over them. Calls that move bytes or wait are awaited, all others are plain.
"""

from aiodatadist._legacy.config import LLMConfig
from aiodatadist._legacy.datadist import LLMDataDist
from aiodatadist._legacy.kv_cache import KvCache
from aiodatadist._legacy.kv_cache_manager import KvCacheManager
from aiodatadist._legacy.model import LLMModel
from aiodatadist._legacy.model_config import ModelConfig
from aiodatadist._legacy.requests import CapacityState, LLMReq
from aiodatadist._legacy.runner import ModelRunner
from aiodatadist._legacy.tensor import Tensor, TensorDesc

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
