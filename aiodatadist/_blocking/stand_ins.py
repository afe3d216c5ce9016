"""Stand-ins for imports of scripts for an Ascend machine: ``llm_datadist`` and ``hixl`` are ours, npu tensors the CPU's."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

from aiodatadist import blocking
from aiodatadist._blocking.datadist import finalize_all
from aiodatadist._context_caching.ems.common import exception
from aiodatadist.blocking import hixl
from aiodatadist.context_caching import ems

_PARTS = (
    "configs", "data_type", "status", "utils", "utils.utils",
    "v2", "v2.cache_manager", "v2.config", "v2.llm_datadist", "v2.llm_types", "v2.llm_utils", "v2_list",
)  # fmt: skip
"""Modules of upstream from which scripts import names, too.

Private names are missing, except ``v2.llm_datadist._shutdown_handler``.
"""
NAMES: dict[str, Any] = {
    **{
        f"{name}{part}": blocking
        for name in ("llm_datadist", "llm_datadist_v1")
        for part in ("", *(f".{p}" for p in _PARTS))
    },
    "hixl": hixl,
    "hixl.hixl": hixl,
    "ems": ems,
    "ems.common": ems,
    "ems.common.exception": exception,
}
"""Modules of the vendor's, each after its package, and the modules that stand for them."""
CHILDREN = Path(__file__).with_name("children")
"""A folder for PYTHONPATH, through which processes that a script starts find the stand-ins."""


class _Alias(ModuleType):
    """A module of the vendor's. It has what ``stands_for`` has, and the modules below it."""

    def __init__(self, name: str, stands_for: ModuleType) -> None:
        super().__init__(name, stands_for.__doc__)
        self.__path__ = []
        self.__all__ = stands_for.__all__
        self._stands_for = stands_for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)


class _Installed:
    """An object for processes that multiprocessing spawns: unpickling it there installs the stand-ins."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, ()


def install() -> None:
    """Let imports of ``llm_datadist`` and ``hixl`` find :mod:`aiodatadist.blocking` here, whatever else is installed.

    If ``torch`` is imported and there is no usable ``torch_npu``, a stand-in is provided, and announced on stderr.
    """
    if isinstance(sys.modules.get("llm_datadist"), _Alias):
        return
    for name, stands_for in NAMES.items():
        alias = sys.modules[name] = _Alias(name, stands_for)
        parent, _, part = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], part, alias)
        if part == "llm_datadist":
            alias._shutdown_handler = finalize_all  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())
    prepared = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {"aiodatadist": _Installed(), **prepared(name)}


def is_ours(name: str) -> bool:
    """Return True if imports of a vendor's module find ours in this process."""
    return isinstance(sys.modules.get(name), _Alias)


def install_for_children() -> None:
    """Install the stand-ins in Python processes that this one starts by any means, through PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILDREN), *([before] if before else [])])


def _announce(what: str) -> None:
    print(f"aiodatadist: {what}", file=sys.stderr, flush=True)


class _Finder(MetaPathFinder):
    """A finder that gives torch an npu when torch or torch_npu is first imported, and then removes itself."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in {"torch", "torch_npu", "torchair"}:
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is None or spec.loader is None:
            _announce("torch is not installed: caches can be made of addresses, numpy arrays and buffers")
            return None
        if fullname == "torch":
            spec.loader = _AndNpu(spec.loader)
            return spec
        importlib.import_module("torch")
        provide_npu()
        given = sys.modules.get(fullname)
        return find_spec(fullname) if given is None else spec_from_loader(fullname, Given(given))


class _AndNpu(Loader):
    """A loader that loads torch and then gives it an npu."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        provide_npu()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Given(Loader):
    """A loader of a module that exists already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def provide_npu() -> None:
    """Give torch, which is imported, an npu: the real one if it can be used."""
    why = _why_not()
    if why is None:
        return
    npu = importlib.import_module("aiodatadist._blocking.npu")
    sys.modules.update(npu.stand_in())
    _announce(f"{why}: npu tensors are CPU tensors, and softnpu moves them")


def _why_not() -> str | None:
    """Return why torch_npu cannot be used, or None if it can."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
        torch: Any = sys.modules["torch"]
        return None if torch.npu.is_available() else "torch_npu sees no NPU"
    except Exception as error:  # a broken installation can raise anything
        return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
