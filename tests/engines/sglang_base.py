"""SGLang's own base classes, without SGLang: its package cannot be imported where there is no GPU.

The files are those of the installed distribution. What stands in is what they import and cannot be had: the packages above
them, whose ``__init__`` files are not run, and ``sglang.srt.server_args``, of which they need one name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.disaggregation")


def sources() -> Path | None:
    """Return the folder where SGLang is installed, or None."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def stand_in(folder: Path) -> None:
    """Put empty modules in place of the packages above the base classes."""
    for name in PACKAGES:
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
    arguments = ModuleType("sglang.srt.server_args")
    arguments.ServerArgs = type("ServerArgs", (), {})  # type: ignore[attr-defined]
    sys.modules.setdefault("sglang.srt.server_args", arguments)


def choosing(folder: Path) -> ModuleType:
    """Load how SGLang chooses its classes from ``disaggregation/utils.py``, without its imports, which are not here."""
    tree = ast.parse((folder / "srt" / "disaggregation" / "utils.py").read_text())
    wanted = {"TransferBackend", "KVClassType"}
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    kept += [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_kv_class"][-1:]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    module = ModuleType("sglang.srt.disaggregation.utils")
    names: dict[str, Any] = vars(module)
    names["Enum"] = Enum
    exec(compile(ast.Module(kept, []), "utils.py", "exec"), names)
    return module
