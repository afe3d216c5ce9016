"""The stand-ins in processes that a script starts: ``python -m aiodatadist.blocking run`` puts this on PYTHONPATH.

Python imports it at its start. It costs next to nothing until one of the names is imported.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = str(HERE.parents[2])
NAMES = {"llm_datadist", "llm_datadist_v1", "ems", "torch", "torch_npu", "torchair"}


class _First(MetaPathFinder):
    """A finder that installs the stand-ins when one of the names is first imported, and then removes itself."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname not in NAMES:
            return None
        sys.meta_path.remove(self)
        if PathFinder.find_spec("aiodatadist") is None:  # a checkout that was only on the parent's path
            sys.path.append(PACKAGE)
        stand_ins = import_module("aiodatadist._blocking.stand_ins")
        stand_ins.install()
        if fullname in sys.modules:
            return spec_from_loader(fullname, stand_ins.Given(sys.modules[fullname]))
        for finder in sys.meta_path:
            if (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        return None


def _go_on() -> None:
    """Run the sitecustomize that this one hides."""
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, _First())
_go_on()
