"""Peers whose process ends or stands still: calls fail, none hangs, and the peer may come back under its name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiodatadist._hixl.names import parse_peer
from aiodatadist._testing.ports import free_port
from aiodatadist.hixl import MemType, Status, TransferOp, TransferOpDesc, status_of
from tests import children
from tests.hixl.pairs import SIZE, Bytes, End, open_end

READ = TransferOp.READ
SERVER = """
import asyncio, sys
from aiodatadist.hixl import Hixl, MemType
from tests.hixl.pairs import Bytes, options

async def main():
    async with Hixl(sys.argv[1], options(0, sys.argv[2])) as engine:
        memory = Bytes(fill=int(sys.argv[3]))
        await engine.register_mem(memory.desc, MemType.MEM_DEVICE)
        print(memory.address, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@asynccontextmanager
async def server(name: str, transport: str, fill: int) -> AsyncIterator[tuple[children.Popen[str], int]]:
    """Run an engine in another process; yield the process, and the address of its memory."""
    command = [sys.executable, "-c", SERVER, name, transport, str(fill)]
    with children.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(await asyncio.to_thread(process.stdout.readline))
        finally:
            process.kill()


async def outcome(end: End, name: str, remote: int, nbytes: int = SIZE) -> Status:
    try:
        await end.engine.transfer(name, READ, [TransferOpDesc(end.memory.address, remote, nbytes)])
    except Exception as error:
        return status_of(error)
    return Status.SUCCESS


@pytest.mark.parametrize("transport", ["hccl", "tcp"])
@pytest.mark.parametrize("auto", ["0", "1"])
async def test_a_killed_peer_fails_calls_at_once_and_may_come_back(transport: str, auto: str) -> None:
    name = f"127.0.0.1:{free_port()}"
    async with open_end(1, transport, AutoConnect=auto) as client:
        for fill in (3, 4):
            async with server(name, transport, fill) as (process, remote):
                if auto == "0":
                    await client.engine.connect(name, 10_000)
                assert await outcome(client, name, remote) is Status.SUCCESS
                assert bytes(client.view) == bytes([fill]) * SIZE
                process.kill()
                await client.engine.cluster.wait_link_closed(parse_peer(name, "name").cluster_id())
            expected = {Status.NOT_CONNECTED} if auto == "0" else {Status.FAILED, Status.TIMEOUT}
            for _ in range(2):
                assert await outcome(client, name, remote) in expected
        late = Bytes()  # the engine works on
        assert await client.engine.register_mem(late.desc, MemType.MEM_DEVICE)


@pytest.mark.parametrize("transport", ["hccl", "tcp"])
async def test_transfers_under_way_fail_when_the_peer_is_killed(transport: str) -> None:
    name = f"127.0.0.1:{free_port()}"
    async with open_end(1, transport) as client, server(name, transport, 5) as (process, remote):
        await client.engine.connect(name, 10_000)
        statuses: list[Status] = []
        many = asyncio.Event()

        async def move() -> None:
            while True:
                statuses.append(await outcome(client, name, remote))
                if len(statuses) >= 20:
                    many.set()
                if statuses[-1] is not Status.SUCCESS:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(move())
            await many.wait()
            os.kill(process.pid, signal.SIGKILL)
        assert set(statuses) <= {Status.SUCCESS, Status.NOT_CONNECTED, Status.FAILED}
        assert statuses.count(Status.SUCCESS) == len(statuses) - 4
        client.view[:] = bytes(SIZE)
        assert await outcome(client, name, remote) is Status.NOT_CONNECTED
        assert bytes(client.view) == bytes(SIZE)
