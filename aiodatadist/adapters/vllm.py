"""KV connectors for vLLM: decode engines get the blocks of prefill engines, or of a context cache.

Configure vLLM with::

    KVTransferConfig(kv_connector="AioDataDistConnector", kv_connector_module_path="aiodatadist.adapters.vllm",
                     kv_role="kv_both", kv_connector_extra_config={"host": "10.0.0.7", "auth_key_file": "/run/key"})

``offer`` is what travels through the router. ``scheduler_side`` and ``worker_side`` are the two halves, which vLLM may
have in one process or in two; ``connector`` is vLLM's class over them, and ``stats`` has its figures.
``context_connector`` is a class with its own halves, over a context cache. vLLM 0.31 or 0.32.
"""

from aiodatadist._adapters.vllm.connector import AioDataDistConnector
from aiodatadist._adapters.vllm.connector_base import register
from aiodatadist._adapters.vllm.context_connector import AioDataDistContextConnector

__all__ = ["AioDataDistConnector", "AioDataDistContextConnector"]

for connector in (AioDataDistConnector, AioDataDistContextConnector):
    register(connector, __name__)
