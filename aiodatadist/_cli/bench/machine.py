"""The software and the machine of a run. They are in every report, so that two reports can be compared."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import anyio
from pydantic import BaseModel, ConfigDict

import aiodatadist
from aiodatadist import LLMDataDist

_STRICTNESS = ("free", "hccs", "roce", "aicpu")


class Machine(BaseModel):
    """The machine and its software.

    Attributes:
        aiodatadist: its version.
        commit: the commit of the clone that the package runs from, followed by ``-dirty`` if files differ; None if it
            is no clone.
    """

    model_config = ConfigDict(frozen=True)

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    aiodatadist: str
    anyio: str
    cffi: str
    loop: str
    commit: str | None = None

    @classmethod
    async def here(cls) -> Machine:
        """Describe this process, and the event loop that runs."""
        loop = type(asyncio.get_running_loop())
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            kernel=platform.release(),
            python=platform.python_version(),
            aiodatadist=aiodatadist.__version__,
            anyio=version("anyio"),
            cffi=version("cffi"),
            loop=f"{loop.__module__.partition('.')[0]} {loop.__name__}",
            commit=await commit_of(Path(aiodatadist.__file__).parents[1]),
        )


async def commit_of(folder: Path) -> str | None:
    """Return the commit of a clone: the version alone does not distinguish two states of a clone."""
    if not (folder / ".git").exists():
        return None
    try:
        commit = (await _git(folder, "rev-parse", "--short=12", "HEAD")).stdout.decode().strip()
        is_dirty = (await _git(folder, "diff-index", "--quiet", "HEAD", "--")).returncode != 0
    except OSError:  # there is no git
        return None
    return commit + "-dirty" * is_dirty if commit else None


async def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Query git without writing anything: the index may be in use.

    Variables of a hook are removed, because they name another repository.
    """
    environment = {name: value for name, value in os.environ.items() if name not in {"GIT_DIR", "GIT_WORK_TREE"}}
    return await anyio.run_process(["git", "-C", str(folder), *words], check=False, env=environment)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "CPU part"}:
            return value.strip()
    return platform.machine()


class Ran(BaseModel):
    """The runtime and devices that moved the bytes.

    Attributes:
        runtime: ``ascend``, or ``soft``.
        strictness: of softnpu: ``free``, ``hccs``, ``roce``.
        copiers: threads of softnpu that share a large copy; None if an NPU copies, or the report is older than this
            figure.
        libraries: the libraries that were opened.
        chip: the vendor's name of it.
        transport: how the bytes of the link travelled: ``hccl``, ``tcp`` or ``loopback``. Without a link, the option.
        device: of the initiator.
    """

    model_config = ConfigDict(frozen=True)

    runtime: str
    strictness: str | None
    libraries: list[str]
    version: str
    chip: str
    transport: str
    device: int
    copiers: int | None = None

    @classmethod
    def of(cls, datadist: LLMDataDist) -> Ran:
        runtime, config = datadist.runtime, datadist.config
        return cls(
            runtime=runtime.name,
            strictness=_STRICTNESS[runtime.soft_strictness] if runtime.is_soft else None,
            libraries=[Path(library).name for library in runtime.libraries],
            version=runtime.version,
            chip=runtime.chip,
            transport=config.transport,
            device=datadist.device.index,
            copiers=runtime.soft_copiers if runtime.is_soft else None,
        )
