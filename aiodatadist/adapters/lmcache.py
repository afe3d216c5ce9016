"""LMCache over aiodatadist's context cache, in its embedded, Redis and Mooncake pools.

Configure LMCache with::

    --l2-adapter '{"type": "plugin", "module_path": "aiodatadist.adapters.lmcache", "class_name": "AioDataDistL2Adapter",
                   "adapter_params": {"pool": "redis://10.0.0.9:6379"}}'

``l2_adapter`` is for LMCache's distributed mode, ``remote_connector`` for its remote backend. It needs LMCache 0.5.
"""

from aiodatadist._adapters.lmcache.l2_adapter import AioDataDistL2Adapter, AioDataDistL2AdapterConfig
from aiodatadist._adapters.lmcache.remote_connector import AioDataDistRemoteConnector

__all__ = ["AioDataDistL2Adapter", "AioDataDistL2AdapterConfig", "AioDataDistRemoteConnector"]
