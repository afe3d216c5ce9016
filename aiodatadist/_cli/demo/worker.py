"""The common part of prefill and decode: an open library, and a model that computes in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from aiodatadist import (
    DeviceError,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from aiodatadist._cli.demo.messages import ORDER, Failed, Phase, Progress, TransportChoice
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.pipes import Parent, die_with_parent, open_parent
from aiodatadist._cli.kit.place import Place, place_options
from aiodatadist._values.addresses import host_port

HOST = "127.0.0.1"
PREFILL_CLUSTER = 1
DECODE_CLUSTER = 2
NPU_LINK_TIMEOUT = 60_000
"""Milliseconds for a link: HCCL waits for the peer in whole seconds, and opens its first communicator slowly."""

T = TypeVar("T")
D = TypeVar("D", bound=LLMDataDist)
Work = Callable[[Parent], Awaitable[None]]
Advance = Callable[[int, int], None]
"""Called in the computing thread with the number of steps done, and of all steps."""


def run_worker(work: Work) -> int:
    """Run a worker process: work, then serve until the parent closes stdin."""
    die_with_parent()
    anyio.run(_run, work)
    return 0


async def _run(work: Work) -> None:
    async with open_parent(ORDER) as parent:
        try:
            await work(parent)
        except CommandError as error:
            await parent.report(Failed(message=str(error), exit_code=error.exit_code))
        except LLMException as error:
            await parent.report(Failed(message=str(error)))


@asynccontextmanager
async def open_datadist(
    role: LLMRole, cluster_id: int, port: int, place: Place, transport: TransportChoice
) -> AsyncIterator[LLMDataDist]:
    """Open the library, listening on ``port`` of this machine; 0 is any free one.

    Raises:
        CommandError: if the port is not available.
    """
    config = LLMConfig(listen_ip_info=f"{HOST}:{port}", transport=transport, **await place_options(place))
    async with opened(LLMDataDist(role, cluster_id, config)) as datadist:
        yield datadist


@asynccontextmanager
async def opened(datadist: D) -> AsyncIterator[D]:
    """Initialise ``datadist`` for the block. Raises CommandError if its port is not available."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(datadist)
        except LLMException as error:
            if isinstance(error, DeviceError) or not isinstance(error.__cause__, OSError):
                raise  # the error is not about the listening socket
            raise wrong_input(f"{error.args[0]}; give another --port, or leave it out for any free one") from error
        yield datadist


async def link_to(
    datadist: LLMDataDist, cluster_id: int, port: int, host: str = HOST, milliseconds: int = 3000
) -> None:
    """Link to the other worker. Raises CommandError if that fails."""
    peer = LLMClusterInfo(remote_cluster_id=cluster_id)
    peer.append_remote_ip_info(host, port)
    timeout = milliseconds if datadist.runtime.is_soft else NPU_LINK_TIMEOUT
    status, _ = await datadist.link_clusters([peer], timeout=timeout)
    if status != LLMStatusCode.LLM_SUCCESS:
        name = "prefill" if cluster_id == PREFILL_CLUSTER else "decode"
        place, why = host_port(host, port), await _why(datadist, cluster_id)
        raise CommandError(f"cannot link to {name} at {place}: {status.name}{why}")


async def _why(datadist: LLMDataDist, cluster_id: int) -> str:
    """Return the result of the last attempt to link, as the end of a sentence."""
    try:
        await datadist.check_link_status(cluster_id)
    except LLMException as error:
        return f": {error.args[0]}"
    return ""


async def compute(parent: Parent, phase: Phase, work: Callable[[Advance], T]) -> T:
    """Run ``work`` in a thread, with its progress reported; if this is cancelled, the thread stops at its next step."""

    def advance(done: int, total: int) -> None:
        anyio.from_thread.check_cancelled()
        anyio.from_thread.run(parent.report, Progress(phase=phase, done=done, total=total))

    return await anyio.to_thread.run_sync(work, advance)
