"""What prefill and decode share: an open library, a KV cache in its memory, and a model that computes in a thread."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    DeviceError,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from aiodatadist.cli.errors import CommandError, wrong_input
from aiodatadist.cli.messages import Failed, Phase, Progress
from aiodatadist.cli.model import Array, ModelConfig, blocks_for
from aiodatadist.cli.pipes import Parent, die_with_parent, open_parent
from aiodatadist.device import Memory

HOST = "127.0.0.1"
PREFILL_CLUSTER = 1
DECODE_CLUSTER = 2
CONFIG = ModelConfig()

T = TypeVar("T")
D = TypeVar("D", bound=LLMDataDist)
Work = Callable[[Parent], Awaitable[None]]
Advance = Callable[[int, int], None]
"""Called in the computing thread with steps done and steps in all."""


def run_worker(work: Work) -> int:
    """The life of a worker process: work, then serve until the parent closes its end."""
    die_with_parent()
    anyio.run(_run, work)
    return 0


async def _run(work: Work) -> None:
    async with open_parent() as parent:
        try:
            await work(parent)
        except CommandError as error:
            await parent.report(Failed(message=str(error), exit_code=error.exit_code))
        except LLMException as error:
            await parent.report(Failed(message=str(error)))


@asynccontextmanager
async def open_datadist(role: LLMRole, cluster_id: int, port: int) -> AsyncIterator[LLMDataDist]:
    """The library, listening on ``port`` of this machine; 0 is any free one.

    Raises:
        CommandError: that port cannot be had.
    """
    config = LLMConfig(listen_ip_info=f"{HOST}:{port}")
    async with opened(LLMDataDist(role, cluster_id, config)) as datadist:
        yield datadist


@asynccontextmanager
async def opened(datadist: D) -> AsyncIterator[D]:
    """Initialised, until the end. Raises CommandError: its port cannot be had."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(datadist)
        except LLMException as error:
            if isinstance(error, DeviceError) or not isinstance(error.__cause__, OSError):
                raise  # not the listening socket's complaint
            raise wrong_input(f"{error.args[0]}; give another --port, or leave it out for any free one") from error
        yield datadist


async def link_to(datadist: LLMDataDist, cluster_id: int, port: int) -> None:
    """Raises CommandError: the other worker cannot be linked to."""
    peer = LLMClusterInfo(remote_cluster_id=cluster_id)
    peer.append_remote_ip_info(HOST, port)
    status, _ = await datadist.link_clusters([peer], timeout=3000)
    if status != LLMStatusCode.LLM_SUCCESS:
        name = "prefill" if cluster_id == PREFILL_CLUSTER else "decode"
        raise CommandError(f"cannot link to {name} at {HOST}:{port}: {status.name}")


@dataclass(frozen=True)
class Kv:
    """A blocks cache that the library knows, the same memory as the model sees it, and the blocks of one sequence."""

    cache: Cache
    tensors: list[Array]
    block_table: list[int]

    async def digest(self, blocks: Sequence[int]) -> str:
        """A hash over these blocks of all tensors, in this order."""
        return await anyio.to_thread.run_sync(self._digest, blocks)

    def _digest(self, blocks: Sequence[int]) -> str:
        state = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            state.update(np.take(tensor, blocks, axis=0).data)
        return state.hexdigest()


@asynccontextmanager
async def open_kv(datadist: LLMDataDist, cluster_id: int, tokens: int, seed: int) -> AsyncIterator[Kv]:
    """Registered KV memory for ``tokens`` tokens. There are more blocks than needed, and a sequence lies scattered."""
    needed = blocks_for(tokens)
    num_blocks = needed + needed // 4 + 1
    memory, tensors = await anyio.to_thread.run_sync(allocate_tensors, datadist, num_blocks)
    desc = CacheDesc(CONFIG.num_tensors, CONFIG.cache_shape(num_blocks), DataType.DT_FLOAT, memory.placement)
    addresses = [memory.address + index * desc.size for index in range(CONFIG.num_tensors)]
    cache = await datadist.cache_manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster_id), True)
    table = np.random.default_rng((seed, cluster_id)).permutation(num_blocks)[:needed].tolist()
    try:
        yield Kv(cache, tensors, table)
    finally:
        tensors.clear()  # the library frees the memory when it closes, and nothing may look at it then


def allocate_tensors(datadist: LLMDataDist, num_blocks: int) -> tuple[Memory, list[Array]]:
    """The library's memory for a whole cache, and its tensors, all zero; none may be alive when the library closes.

    Every page has been touched, so that no transfer pays for that.
    """
    # The model computes on the host: on an NPU its cache has to be pinned host memory.
    placement = Placement.DEVICE if datadist.runtime.name == "soft" else Placement.HOST
    memory = datadist.device.allocate(CONFIG.num_tensors * num_blocks * CONFIG.block_bytes, placement)
    tensors = np.frombuffer(memory.view(), np.float32).reshape(CONFIG.num_tensors, *CONFIG.cache_shape(num_blocks))
    tensors.fill(0)
    return memory, list(tensors)


async def compute(parent: Parent, phase: Phase, work: Callable[[Advance], T]) -> T:
    """Run ``work`` in a thread, with its progress reported; if this is cancelled, the thread stops at its next step."""

    def advance(done: int, total: int) -> None:
        anyio.from_thread.check_cancelled()
        anyio.from_thread.run(parent.report, Progress(phase=phase, done=done, total=total))

    return await anyio.to_thread.run_sync(work, advance)
