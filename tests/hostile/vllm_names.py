"""The names of engines' that adapters use, where the engines are not installed.

What is tested is this project's own code: it takes base classes and the ends of a request of vLLM's, and a base class of
SGLang's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from aiodatadist._adapters.peers import Peers
from aiodatadist._counting import Incidents

SGLANG, SGLANG_BASE = "aiodatadist._adapters.sglang", "sglang.srt.disaggregation.base.conn"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
ADAPTER = "aiodatadist._adapters.vllm"
LMCACHE = "aiodatadist._adapters.lmcache"
LMCACHE_NAMES = {
    "lmcache.lmcache_native": "Bitmap",
    "lmcache.v1.distributed.internal_api": "L2StoreResult",
    "lmcache.v1.distributed.l2_adapters.base": "L2AdapterInterface",
    "lmcache.v1.distributed.l2_adapters.config": "L2AdapterConfigBase",
}


class RequestStatus(IntEnum):
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


@contextmanager
def both_halves() -> Iterator[SimpleNamespace]:
    """Load the modules of both halves, which need two names of vLLM's."""
    before = set(sys.modules)
    if importlib.util.find_spec("vllm") is None:
        base, request = ModuleType(BASE), ModuleType("vllm.v1.request")
        for name in ("KVConnectorMetadata", "KVConnectorHandshakeMetadata"):
            setattr(base, name, type(name, (), {}))
        request.RequestStatus = RequestStatus  # type: ignore[attr-defined]
        sys.modules |= {BASE: base, "vllm.v1.request": request}
    try:
        names = ("offer", "orders", "scheduler_side")
        yield SimpleNamespace(**{name: import_module(f"{ADAPTER}.{name}") for name in names})
    finally:
        for name in set(sys.modules) - before:
            if name.startswith((ADAPTER, "vllm.")):
                del sys.modules[name]


@contextmanager
def sglang_manager() -> Iterator[ModuleType]:
    """Load the module of SGLang's manager, likewise."""
    before = set(sys.modules)
    if importlib.util.find_spec("sglang") is None:
        base = ModuleType(SGLANG_BASE)
        base.BaseKVManager = type("BaseKVManager", (), {})  # type: ignore[attr-defined]
        sys.modules[SGLANG_BASE] = base
    try:
        yield import_module(f"{SGLANG}.manager")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith((SGLANG, "sglang.")):
                del sys.modules[name]


def asking_manager(module: ModuleType, peers: Peers, asks: Any) -> Any:
    """Return a manager of this module that does nothing but ask bootstrap servers for ranks."""
    manager = object.__new__(module.AioDataDistKVManager)
    manager._peers, manager._asks = peers, asks
    manager.prefill_info_table, manager.incidents = {}, Incidents()
    return manager


@contextmanager
def lmcache_adapter() -> Iterator[ModuleType]:
    """Load the module of LMCache's second-level storage, likewise."""
    before = set(sys.modules)
    if importlib.util.find_spec("lmcache") is None:
        for module, name in LMCACHE_NAMES.items():
            made = ModuleType(module)
            setattr(made, name, type(name, (), {}))
            sys.modules[module] = made
    try:
        yield import_module(f"{LMCACHE}.l2_adapter")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith((LMCACHE, "lmcache.")):
                del sys.modules[name]


@contextmanager
def figures_of_vllm() -> Iterator[ModuleType]:
    """Load the module of the figures that vLLM collects, likewise."""
    before = set(sys.modules)
    if importlib.util.find_spec("vllm") is None:
        made = ModuleType(METRICS)
        made.KVConnectorStats = _Stats  # type: ignore[attr-defined]
        made.KVConnectorPromMetrics = _PromMetrics  # type: ignore[attr-defined]
        sys.modules[METRICS] = made
    try:
        yield import_module(f"{ADAPTER}.stats")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith((ADAPTER, "vllm.")):
                del sys.modules[name]


class _Stats:
    """A stand-in for vLLM's statistics, a dataclass of this one field."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class _PromMetrics:
    """A stand-in for vLLM's metrics, which keeps its arguments."""

    def __init__(
        self, _: Any, metric_types: dict[Any, Any], labelnames: list[str], labelvalues: dict[int, list[object]]
    ) -> None:
        by_name = {kind.__name__: made for kind, made in metric_types.items()}
        self._counter_cls, self._histogram_cls = by_name["Counter"], by_name["Histogram"]
        self._labelnames = labelnames
        self.per_engine_labelvalues = labelvalues
