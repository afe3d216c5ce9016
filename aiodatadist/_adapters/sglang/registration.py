"""The registration of these classes in place of one of SGLang's backends."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from aiodatadist._adapters.sglang.bootstrap_server import AioDataDistKVBootstrapServer
from aiodatadist._adapters.sglang.manager import AioDataDistKVManager
from aiodatadist._adapters.sglang.receiver import AioDataDistKVReceiver
from aiodatadist._adapters.sglang.sender import AioDataDistKVSender

UTILS = "sglang.srt.disaggregation.utils"
CLASSES = {
    "manager": AioDataDistKVManager,
    "sender": AioDataDistKVSender,
    "receiver": AioDataDistKVReceiver,
    "bootstrap_server": AioDataDistKVBootstrapServer,
}


def register(instead_of: str = "nixl", utils: ModuleType | None = None) -> None:
    """Make SGLang in this process use these classes for that backend. May be called more than once.

    Args:
        instead_of: a name of SGLang's ``TransferBackend``.
        utils: SGLang's ``disaggregation.utils``, imported if None.

    Raises:
        ImportError: if SGLang is not installed.
        RuntimeError: if this SGLang chooses its classes in another way than 0.5.23.
        ValueError: if it has no backend of this name.
    """
    found = utils or import_module(UTILS)
    original, backends, kinds = (getattr(found, n, None) for n in ("get_kv_class", "TransferBackend", "KVClassType"))
    if original is None or backends is None or kinds is None or not set(CLASSES) <= {kind.value for kind in kinds}:
        raise RuntimeError(
            f"{found.__name__} lacks what SGLang 0.5.23 chooses its backend by: TransferBackend, get_kv_class"
        )
    backend = backends(instead_of)
    inner = getattr(original, "instead", original)

    def get_kv_class(transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is backend and class_type.value in CLASSES:
            return CLASSES[class_type.value]
        return inner(transfer_backend, class_type)

    get_kv_class.instead = inner  # type: ignore[attr-defined]
    for module in [found, *list(sys.modules.values())]:
        if getattr(module, "__name__", "").startswith("sglang") and vars(module).get("get_kv_class") is original:
            module.get_kv_class = get_kv_class  # type: ignore[attr-defined]
    found.get_kv_class = get_kv_class  # type: ignore[attr-defined]
