"""SGLang's prefill and decode disaggregation over aiodatadist.

Call this in each process, before SGLang's schedulers are made::

    aiodatadist.adapters.sglang.register("nixl")

SGLang has no hook for an external backend: :func:`register` replaces the backend of that name by these classes, and
SGLang is started with ``--disaggregation-transfer-backend nixl``. The environment variable ``AIODATADIST_SGLANG`` has
settings as JSON. It needs SGLang 0.5.
"""

from aiodatadist._adapters.sglang.bootstrap_server import AioDataDistKVBootstrapServer
from aiodatadist._adapters.sglang.manager import AioDataDistKVManager
from aiodatadist._adapters.sglang.receiver import AioDataDistKVReceiver
from aiodatadist._adapters.sglang.registration import register
from aiodatadist._adapters.sglang.sender import AioDataDistKVSender

__all__ = [
           "AioDataDistKVBootstrapServer",
           "AioDataDistKVManager",
           "AioDataDistKVReceiver",
           "AioDataDistKVSender",
           "register",
          ]  # fmt: skip
