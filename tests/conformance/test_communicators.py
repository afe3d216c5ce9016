"""Communicators: made and destroyed one at a time in a process, prepared once, and waited for if they cannot be stopped."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from aiodatadist import LLMStatusCode
from aiodatadist._device import Device
from aiodatadist._transport import Channel, ChannelOffer, Endpoint, RdmaConfig, Transport, communicator, open_transport
from aiodatadist._transport.communicator import Communicator, communicator_config
from aiodatadist._transport.hccl import rank_table
from aiodatadist.errors import LinkError, LinkTimeout
from aiodatadist.testing import (
    cluster_info,
    inside,
    open_cluster,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
)
from tests import children
from tests.held import each_held, turns

names = (f"communicators-{os.getpid()}-{number}" for number in itertools.count())
LIMIT = 30.0


class Hccl:
    """HCCL's functions, each call of which is seen: by ``around``, which makes it."""

    def __init__(self, functions: Any, around: Callable[[str, Callable[..., int], Any], int]) -> None:
        self._functions = functions
        self._around = around

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        return lambda *args: self._around(name, function, args)


@asynccontextmanager
async def two_transports() -> AsyncIterator[tuple[Transport, Transport]]:
    async with AsyncExitStack() as stack:
        made = []
        for index in range(2):
            device = await stack.enter_async_context(await Device.open(index))
            made.append(open_transport("hccl", device))
            stack.push_async_callback(made[-1].aclose)
        yield made[0], made[1]


async def channels(ends: tuple[Transport, Transport], name: str) -> list[Channel]:
    endpoints = (ends[0].endpoint, ends[1].endpoint)
    return list(
        await asyncio.gather(
            *(end.open_channel(ChannelOffer(name, rank, endpoints), LIMIT) for rank, end in enumerate(ends))
        )
    )


@pytest.mark.usefixtures("no_leaks")
class TestOneAtATime:
    async def test_making_and_destroying_take_turns_on_all_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inside: Counter[str] = Counter()
        met: set[tuple[str, ...]] = set()
        lock = threading.Lock()

        def watched(name: str, function: Callable[..., int], args: Any) -> int:
            if name not in {"HcclCommInitClusterInfoMemConfig", "HcclCommDestroy"}:
                return function(*args)
            with lock:
                inside[name] += 1
                met.add(tuple(sorted(inside.elements())))
            try:
                return function(*args)
            finally:
                with lock:
                    inside[name] -= 1

        async with two_transports() as ends:
            runtime = ends[0].device.runtime
            monkeypatch.setattr(runtime, "hccl", Hccl(runtime.hccl, watched))
            async with each_held("HcclCommInitClusterInfoMemConfig"), each_held("HcclCommDestroy"):
                first = await asyncio.gather(*(channels(ends, next(names)) for _ in range(3)))
                closing = [channel.aclose() for pair in first for channel in pair]
                opening = asyncio.create_task(channels(ends, next(names)))
                await asyncio.gather(opening, *closing)
                await asyncio.gather(*(channel.aclose() for channel in opening.result()))
        assert met == {("HcclCommInitClusterInfoMemConfig",), ("HcclCommDestroy",)}

    async def test_a_peer_that_does_not_come_holds_up_no_others(self) -> None:
        async with two_transports() as ends:
            endpoints = (ends[0].endpoint, ends[1].endpoint)
            waiting = asyncio.create_task(ends[0].open_channel(ChannelOffer(next(names), 0, endpoints), LIMIT))
            comms = soft_counters()["comms"]
            while soft_counters()["comms"] == comms:  # noqa: ASYNC110 - it is softnpu that changes it, in a thread
                await asyncio.sleep(0)
            for channel in await channels(ends, next(names)):
                await channel.aclose()
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])

    async def test_the_event_loop_goes_on_while_another_thread_has_the_turn(self) -> None:
        async with two_transports() as ends:
            pair = await channels(ends, next(names))
            with soft_hold("HcclCommDestroy") as close:
                comms = soft_counters()["comms"]
                closing = [asyncio.create_task(channel.aclose()) for channel in pair]
                await close.arrived()
                await turns(100)
                assert soft_counters()["comms"] == comms
                close.release()
                await asyncio.gather(*closing)

    async def test_a_thread_waits_for_its_turn_also_if_the_process_was_stopped_for_an_hour(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wait on: the member that had the turn could not use that time either."""
        looked = threading.Event()

        class AnHourLater:
            @staticmethod
            def monotonic() -> float:
                looked.set()
                return time.monotonic() + 3600

        async with two_transports() as ends:
            pair = await channels(ends, next(names))
            with soft_hold("HcclCommDestroy") as close:
                first = asyncio.create_task(pair[0].aclose())
                await close.arrived()
                monkeypatch.setattr(communicator, "time", AnHourLater)
                second = asyncio.create_task(pair[1].aclose())
                await asyncio.to_thread(looked.wait)
                close.release()
                await asyncio.gather(first, second)

    def test_a_forked_child_has_a_turn_of_its_own(self) -> None:
        program = """if True:
            import os
            from aiodatadist._transport import communicator
            communicator._turn.take()
            pid = os.fork()
            if not pid:
                os._exit(1 if communicator._turn.is_taken else 0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            communicator._turn.give()
            assert not communicator._turn.is_taken
        """
        children.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.usefixtures("no_leaks")
class TestPreparing:
    async def test_a_communicator_is_prepared_once(self) -> None:
        def program(device: Device, ends: tuple[Endpoint, Endpoint]) -> None:
            comm = Communicator(device)
            with device.current():
                comm.make(rank_table(ends), 0, communicator_config(next(names), 1, RdmaConfig()))
                with soft_faults_cleared():
                    soft_fault("HcclCommPrepare:fail=4")
                    with pytest.raises(LinkError, match="HcclCommPrepare"):
                        comm.prepare(LIMIT)
                with pytest.raises(LinkError, match="prepared only once: make another"):
                    comm.prepare(LIMIT)
                comm.destroy()
                comm.destroy()

        async with two_transports() as ends:
            await asyncio.to_thread(program, ends[0].device, (ends[0].endpoint, ends[1].endpoint))

    async def test_each_attempt_at_a_link_has_a_communicator_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: Counter[str] = Counter()
        prepared: Counter[Any] = Counter()

        def counted(name: str, function: Callable[..., int], args: Any) -> int:
            calls[name] += 1
            if name == "HcclCommPrepare":
                prepared[args[0]] += 1
            return function(*args)

        async with open_cluster(1) as prompt, open_cluster(2, device_id=1, link_retry_count=3) as decoder:
            assert inside(decoder.datadist) is not None
            runtime = inside(decoder.datadist).device.runtime
            monkeypatch.setattr(runtime, "hccl", Hccl(runtime.hccl, counted))
            comms = soft_counters()["comms"]
            with soft_faults_cleared():
                soft_fault("HcclCommPrepare:fail=4@*")
                status, _ = await decoder.datadist.link_clusters([cluster_info(prompt)], timeout=6000)
            assert status is LLMStatusCode.LLM_LINK_FAILED
            assert soft_counters()["comms"] == comms
        assert set(prepared.values()) == {1}
        assert calls["HcclCommInitClusterInfoMemConfig"] == calls["HcclCommDestroy"]
        # An attempt that the peer has given up meanwhile, because this end got no core, is not prepared.
        assert 3 <= calls["HcclCommPrepare"] <= calls["HcclCommDestroy"]

    async def test_a_wait_that_cannot_be_called_off_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wait as on an NPU: the cancellation comes when HCCL gave up by itself, and nothing is left."""
        over: list[str] = []

        def seen(name: str, function: Callable[..., int], args: Any) -> int:
            code = function(*args)
            over.append(name)
            return code

        async with two_transports() as ends:
            runtime = ends[0].device.runtime
            monkeypatch.setattr(runtime, "hccl", Hccl(runtime.hccl, seen))
            monkeypatch.setattr(Communicator, "_end_waiting", lambda _: None)
            endpoints = (ends[0].endpoint, ends[1].endpoint)
            opening = asyncio.create_task(ends[0].open_channel(ChannelOffer(next(names), 0, endpoints), 0.2))
            while "HcclCommInitClusterInfoMemConfig" not in over:  # noqa: ASYNC110 - in a thread
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert over[-1] == "HcclCommDestroy"

    async def test_cards_that_have_no_link_are_told_the_rule_and_the_remedy(self) -> None:
        """Report E_NOT_SUPPORT with the rule. [src hccl_one_sided_service.cc IsUsedRdma: E_NOT_SUPPORT]."""

        def program(device: Device, ends: tuple[Endpoint, Endpoint]) -> None:
            comm = Communicator(device)
            with device.current(), soft_faults_cleared():
                comm.make(rank_table(ends), 0, communicator_config(next(names), 1, RdmaConfig()))
                soft_fault("HcclCommPrepare:fail=5")
                with pytest.raises(LinkError, match="HCCL_E_NOT_SUPPORT") as refused:
                    comm.prepare(1)
                comm.destroy()
            assert "different HCCS groups" in str(refused.value.hint)
            assert "HCCL_INTRA_ROCE_ENABLE=1 at both ends" in str(refused.value.hint)

        async with two_transports() as ends:
            await asyncio.to_thread(program, ends[0].device, (ends[0].endpoint, ends[1].endpoint))

    async def test_what_is_called_off_before_it_waits_never_waits(self) -> None:
        def program(device: Device, ends: tuple[Endpoint, Endpoint]) -> None:
            comm = Communicator(device)
            comm.call_off()
            with device.current():
                comm.make(rank_table(ends), 0, communicator_config(next(names), 1, RdmaConfig()))
                with soft_faults_cleared():
                    soft_fault("HcclCommPrepare:fail=4")
                    with pytest.raises(LinkTimeout, match="called off before"):
                        comm.prepare(LIMIT)
                comm.destroy()

        async with two_transports() as ends:
            await asyncio.to_thread(program, ends[0].device, (ends[0].endpoint, ends[1].endpoint))
