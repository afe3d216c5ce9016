"""A KV connector for vLLM: decode engines pull the blocks of prefill engines.

::

    KVTransferConfig(kv_connector="AioDataDistConnector", kv_connector_module_path="aiodatadist.adapters.vllm",
                     kv_role="kv_both", kv_connector_extra_config={"host": "10.0.0.7", "auth_key_file": "/run/key"})

``offer`` is what travels through the router; ``scheduler_side`` and ``worker_side`` are the two halves, which vLLM may have
in one process or in two; ``connector`` is vLLM's class over them, and ``stats`` its figures. It needs vLLM 0.32.
"""

from aiodatadist.adapters.vllm.connector import AioDataDistConnector

__all__ = ["AioDataDistConnector"]
