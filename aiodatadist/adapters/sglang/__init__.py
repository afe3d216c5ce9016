"""SGLang's prefill and decode disaggregation over aiodatadist.

Call this in each process, before SGLang's schedulers are made::

    aiodatadist.adapters.sglang.register("nixl")

SGLang has no hook for an external backend: :func:`register` replaces the backend of that name by these classes, and
SGLang is started with ``--disaggregation-transfer-backend nixl``. The environment variable ``AIODATADIST_SGLANG`` has
settings as JSON. It needs SGLang 0.5.
"""

from aiodatadist.adapters.sglang.bootstrap_server import AioDataDistKVBootstrapServer
from aiodatadist.adapters.sglang.manager import AioDataDistKVManager
from aiodatadist.adapters.sglang.receiver import AioDataDistKVReceiver
from aiodatadist.adapters.sglang.registration import register
from aiodatadist.adapters.sglang.sender import AioDataDistKVSender

__all__ = [
           "AioDataDistKVBootstrapServer",
           "AioDataDistKVManager",
           "AioDataDistKVReceiver",
           "AioDataDistKVSender",
           "register",
          ]  # fmt: skip
