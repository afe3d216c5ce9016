"""softnpu under the names of the vendor's libraries: what runs with it takes the way that it takes on an NPU."""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from aiodatadist._native.library import SOFTNPU
from tests import children

OLD = ("libascendcl.so", "libhccl.so")  # before CANN 8.5
NEW = ("libacl_rt.so", "libascendcl.so", "libhcomm.so", "libhccl.so")


@cache
def _folder() -> Path:
    folder = Path(mkdtemp(prefix="names"))
    atexit.register(shutil.rmtree, folder)
    children.serve({**os.environ, "LD_LIBRARY_PATH": str(folder)})
    return folder


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield an empty folder, the same each time: programs that look for libraries in it are forked.

    Where a program looks is decided when its interpreter starts, so another folder would need another interpreter.
    """
    folder = _folder()
    try:
        yield folder
    finally:
        for entry in folder.iterdir():
            entry.unlink()


def install(folder: Path, names: tuple[str, ...] = NEW) -> None:
    """Make symbolic links to softnpu in a folder that has none of these names so far."""
    for name in names:
        (folder / name).symlink_to(SOFTNPU)


def install_tool(folder: Path) -> None:
    """Install an ``hccn_tool`` that knows the address of each device's network card, as on a machine with RoCE links."""
    tool = folder / "hccn_tool"
    tool.write_text('#!/bin/sh\necho "ipaddr:10.0.0.$(($2 + 1))"\n', encoding="utf-8")
    tool.chmod(0o755)


def environment(folder: Path, strict: str = "") -> dict[str, str]:
    """Return the environment of a child process that opens the folder's libraries as the vendor's, and finds its tool.

    Args:
        strict: SOFTNPU_STRICT: ``hccs``, ``roce`` or ``aicpu``; empty: softnpu takes whatever makes sense.
    """
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    own = {"AIODATADIST_RUNTIME": "ascend", "LD_LIBRARY_PATH": str(folder), "PATH": path}
    kept = {key: value for key, value in os.environ.items() if key != "SOFTNPU_STRICT"}
    return {**kept, **own, **({"SOFTNPU_STRICT": strict} if strict else {})}


def resource(device: int, server: str = "127.0.0.1", strict: str = "") -> str:
    """Return a ``local_comm_res`` for one of softnpu's devices, each with its own address; of version 1.2 on its A3."""
    described = {"device_id": str(device), "device_ip": f"10.0.0.{device + 1}"}
    pods: dict[str, Any] = {}
    if strict == "aicpu":
        described["super_device_id"] = str(device)
        pods["super_pod_list"] = [{"super_pod_id": "0", "server_list": [{"server_id": server}]}]
    table = {
        "version": "1.2" if pods else "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [{"server_id": server, "device": [described]}],
        **pods,
    }
    return json.dumps(table)
