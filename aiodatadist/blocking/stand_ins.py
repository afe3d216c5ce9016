"""What scripts for an Ascend machine import, where there is none: ``llm_datadist`` is ours, npu tensors are the CPU's."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from aiodatadist import blocking

NAMES = ("llm_datadist", "llm_datadist_v1")
PARTS = ("configs", "data_type", "status", "v2", "v2.cache_manager", "v2.llm_datadist", "v2.llm_types")
"""Modules of upstream's from which scripts take names as well."""


class _Alias(ModuleType):
    """A module of upstream's: it has what :mod:`aiodatadist.blocking` has, and the modules below it."""

    __all__ = blocking.__all__

    def __init__(self, name: str) -> None:
        super().__init__(name, blocking.__doc__)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return getattr(blocking, name)


class _Installed:
    """Goes to processes that multiprocessing spawns, before they import the script: unpickling it installs all this there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, ()


def install() -> None:
    """Let this process's imports of ``llm_datadist`` find :mod:`aiodatadist.blocking`, whatever else is installed.

    When ``torch`` is imported and no usable ``torch_npu`` is there, that gets a stand-in, which is announced on stderr.
    """
    if isinstance(sys.modules.get(NAMES[0]), _Alias):
        return
    for name in NAMES:
        for module in (name, *(f"{name}.{part}" for part in PARTS)):
            alias = sys.modules[module] = _Alias(module)
            parent, _, part = module.rpartition(".")
            if parent:
                setattr(sys.modules[parent], part, alias)
    sys.meta_path.insert(0, _Finder())
    prepared = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {"aiodatadist": _Installed(), **prepared(name)}


def _announce(what: str) -> None:
    print(f"aiodatadist: {what}", file=sys.stderr, flush=True)


class _Finder(MetaPathFinder):
    """Sees to it that torch has an npu, when either of the two is imported first; then it is gone."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in {"torch", "torch_npu"}:
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
        return spec_from_loader("torch_npu", _Given(sys.modules["torch_npu"]))


class _AndNpu(Loader):
    """Loads torch, and then what torch has an npu by."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        provide_npu()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Given(Loader):
    """A module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def provide_npu() -> None:
    """Torch is imported: it has an npu afterwards, the real one if it can be used."""
    why = _why_not()
    if why is None:
        return
    npu = importlib.import_module("aiodatadist.blocking.npu")
    sys.modules["torch_npu"] = npu.stand_in()
    _announce(f"{why}: npu tensors are CPU tensors, and softnpu moves them")


def _why_not() -> str | None:
    """Why torch_npu cannot be used; None: it can."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
        torch: Any = sys.modules["torch"]
        return None if torch.npu.is_available() else "torch_npu sees no NPU"
    except Exception as error:  # whatever a broken installation raises
        return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
