"""The life of an awaitable engine if several tasks begin and end it, and transfers that connect meanwhile."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiodatadist._hixl import engine as module
from aiodatadist._hixl.cluster import RangeCluster
from aiodatadist._testing.ports import free_port
from aiodatadist._testing.views import connecting_of
from aiodatadist.hixl import Hixl, Status, TransferOp
from tests.held import PULL, held_transfer
from tests.hixl.pairs import SIZE, descs, open_end, options
from tests.hixl.test_engine import said, status_of_transfer
from tests.hixl.test_late_bytes import ended, let_go

READ = TransferOp.READ


@pytest.mark.parametrize("port", [":0", ""], ids=["it listens", "it only connects"])
async def test_an_engine_that_two_tasks_initialise_opens_one_cluster(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RangeCluster] = []

    class Cluster(RangeCluster):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(module, "RangeCluster", Cluster)
    engine = Hixl(f"127.0.0.1:{free_port()}" if port else "127.0.0.1", options(0))
    statuses = await asyncio.gather(*(said(engine.initialize()) for _ in range(3)))
    assert statuses == [Status.SUCCESS] * 3
    await engine.finalize()
    assert len(made) == 1  # a second one would run on


async def test_an_engine_that_one_task_finalizes_while_another_initialises_it_is_closed() -> None:
    name = f"127.0.0.1:{free_port()}"
    engine = Hixl(name, options(0))
    opening = asyncio.ensure_future(engine.initialize())
    await checkpoint()
    assert not opening.done()
    await engine.finalize()
    await opening
    with pytest.raises(RuntimeError, match="not initialised"):
        engine.get_notifies()
    async with Hixl(name, options(0)):  # the name and the device are free
        pass


async def test_an_engine_that_is_finalized_and_initialised_at_once_is_open() -> None:
    async with open_end(0) as end:
        leaving = asyncio.ensure_future(end.engine.finalize())
        await checkpoint()
        assert not leaving.done()
        await end.engine.initialize()
        assert leaving.done()
        assert end.engine.name == end.name


async def test_a_cancelled_finalize_closes_the_engine() -> None:
    name = f"127.0.0.1:{free_port()}"
    engine = Hixl(name, options(0))
    await engine.initialize()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await engine.finalize()
    async with Hixl(name, options(0)):
        pass


async def test_a_transfer_is_under_way_if_room_for_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is finalized while it closes idle connections: the transfer ends once no byte can land."""
    keys = {"max_channel": 4, "high_waterline": 0.5, "low_waterline": 0.25}
    given: dict[str, Any] = {
        "GlobalResourceConfig": json.dumps({f"channel_pool.{key}": value for key, value in keys.items()})
    }
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(open_end(1 + number)) for number in range(3)]
        client = await stack.enter_async_context(open_end(0, AutoConnect="1", **given))
        engine, leaving = client.engine, list[asyncio.Future[None]]()
        for server in servers[:2]:
            await engine.transfer(server.name, READ, descs(client, server, (0, 0, 10)))
        disconnect = engine.disconnect

        with held_transfer(PULL) as held:

            async def finalized_before(name: str) -> None:
                if not leaving:
                    await held.arrived()
                    leaving.append(asyncio.ensure_future(engine.finalize()))
                    await checkpoint()
                await disconnect(name)

            monkeypatch.setattr(engine, "disconnect", finalized_before)
            task = engine.transfer(servers[2].name, READ, descs(client, servers[2], (0, 0, SIZE)))
            await let_go(task, held, lambda: len(leaving) == 1 and not leaving[0].done())
            await leaving[0]
        assert await ended(task) is Status.FAILED
        assert "the engine was finalized" in str(task.exception())


async def test_no_lock_stays_of_a_connection_that_a_transfer_made() -> None:
    async with open_end(0, "loopback", fill=4) as server, open_end(0, "loopback", AutoConnect="1") as client:
        ranges, gone = descs(client, server, (0, 0, 100)), f"127.0.0.1:{free_port()}"
        tasks = [client.engine.transfer(name, READ, ranges) for name in [server.name] * 4 + [gone] * 2]
        await checkpoint()
        assert len(connecting_of(client.engine)) == 2
        tasks[1].cancel()  # while it waits for the first
        statuses = [await ended(task) for task in tasks]
        assert statuses[:4] == [Status.SUCCESS, None, Status.SUCCESS, Status.SUCCESS]
        assert set(statuses[4:]) <= {Status.FAILED, Status.TIMEOUT}
        assert not connecting_of(client.engine)
        assert await status_of_transfer(client, server.name, READ, ranges) is Status.SUCCESS
