"""Members that know a rank table and nothing else meet, or learn that they cannot; nothing is left of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

from aiodatadist._device import Device
from aiodatadist._transport.blob_exchange import BLOB, meet, validate
from aiodatadist.errors import LinkError, LinkTimeout, LLMException, ParamInvalid
from aiodatadist.testing import soft_counters, soft_fault, soft_faults_cleared
from tests import children
from tests.stopwatch import lasting

names = (f"rendezvous-{os.getpid()}-{number}" for number in itertools.count())
LIMIT = 30.0  # of meetings that should happen
USED = ("comms", "streams", "device_bytes", "pinned_bytes", "threads", "events")


def table(members: int, version: str = "1.0") -> dict[str, Any]:
    devices = [
        {"device_id": str(i), "device_ip": f"10.0.0.{i}", "rank_id": str(i), "super_device_id": str(i)}
        for i in range(members)
    ]
    if version == "1.0":
        servers = [{"server_id": "127.0.0.1", "device": devices}]
    else:
        servers = [{"server_id": f"127.0.0.{i}", "device": [device]} for i, device in enumerate(devices)]
    made = {"version": version, "server_count": str(len(servers)), "status": "completed", "server_list": servers}
    if version == "1.2":
        made["super_pod_list"] = [
            {"super_pod_id": "0", "server_list": [{"server_id": s["server_id"]} for s in servers]}
        ]
    return made


def blob_of(rank: int, nbytes: int) -> bytes:
    return bytes((rank * 31 + i) % 255 + 1 for i in range(nbytes))


@asynccontextmanager
async def open_devices(count: int) -> AsyncIterator[list[Device]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await Device.open(index)) for index in range(count)]


@contextmanager
def nothing_left() -> Iterator[None]:
    before = {name: soft_counters()[name] for name in USED}
    yield
    assert {name: soft_counters()[name] for name in USED} == before


async def meeting(
    devices: list[Device], name: str, nbytes: int = 100, timeout: float = LIMIT
) -> list[dict[int, bytes]]:
    """Let all members meet, each on its own device, and return what each has."""
    members, text = len(devices), json.dumps(table(len(devices)))
    return await asyncio.gather(
        *(meet(devices[i], name, i, members, text, blob_of(i, nbytes), timeout) for i in range(members))
    )


async def outcome(awaited: Any) -> Any:
    try:
        return await awaited
    except LLMException as error:
        return error


async def outcomes(devices: list[Device], name: str, timeout: float) -> list[Any]:
    members, text = len(devices), json.dumps(table(len(devices)))
    return await asyncio.gather(
        *(outcome(meet(devices[i], name, i, members, text, b"", timeout)) for i in range(members))
    )


async def waits(comms: int) -> None:
    """Wait until there is one more communicator: its member then has all it needs, and waits for the others."""
    while soft_counters()["comms"] == comms:  # noqa: ASYNC110 - it is softnpu that changes it, in a thread
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_leaks")
class TestMeeting:
    @pytest.mark.parametrize("members", [2, 3, 4])
    async def test_each_member_gets_the_blobs_of_all_others(self, members: int) -> None:
        async with open_devices(members) as devices:
            with nothing_left():
                got = await meeting(devices, next(names))
            all_ranks = {rank: blob_of(rank, 100) for rank in range(members)}
            assert got == [{r: b for r, b in all_ranks.items() if r != own} for own in range(members)]

    @pytest.mark.parametrize("nbytes", [0, 1, BLOB])
    async def test_blobs_of_any_size(self, nbytes: int) -> None:
        async with open_devices(2) as devices:
            assert await meeting(devices, next(names), nbytes) == [{1: blob_of(1, nbytes)}, {0: blob_of(0, nbytes)}]

    async def test_members_may_come_in_any_order(self) -> None:
        text = json.dumps(table(3, "1.2"))
        async with open_devices(3) as devices:
            for order in itertools.permutations(range(3)):
                name = next(names)
                async with asyncio.TaskGroup() as group:
                    for rank in order:
                        group.create_task(meet(devices[rank], name, rank, 3, text, b"x", LIMIT))
                        await asyncio.sleep(0)

    async def test_again_and_again_under_one_name(self) -> None:
        async with open_devices(2) as devices:
            name = next(names)
            with nothing_left():
                for nbytes in range(25):
                    assert (await meeting(devices, name, nbytes))[0] == {1: blob_of(1, nbytes)}

    async def test_meetings_of_one_device_do_not_wait_for_each_other(self) -> None:
        """Two devices have two meetings, and begin with different ones: neither meeting is over before both are begun."""
        text = json.dumps(table(2))
        async with open_devices(2) as devices:
            first, second = next(names), next(names)
            ends: list[Any] = []

            async def one(rank: int, name: str) -> None:
                ends.append(await meet(devices[rank], name, rank, 2, text, b"", LIMIT))

            async with asyncio.TaskGroup() as group:
                for rank, name in [(0, first), (1, second)]:
                    comms = soft_counters()["comms"]
                    group.create_task(one(rank, name))
                    await waits(comms)
                assert ends == []
                for rank, name in [(0, second), (1, first)]:
                    group.create_task(one(rank, name))
            assert len(ends) == 4

    async def test_a_member_in_another_process(self) -> None:
        name, text = next(names), json.dumps(table(2))
        process = await children.create_subprocess_exec(
            sys.executable, "-m", __name__, name, text, stdout=asyncio.subprocess.PIPE
        )
        async with open_devices(1) as (device,):
            got = await meet(device, name, 0, 2, text, b"from here", LIMIT)
        out, _ = await process.communicate()
        assert (got, out, process.returncode) == ({1: b"from there"}, b"from here", 0)


@pytest.mark.usefixtures("no_leaks")
class TestMissingMembers:
    @pytest.mark.parametrize(("present", "members"), [([0], 2), ([1], 2), ([0, 2], 3), ([1, 2], 3)])
    async def test_a_missing_member_is_a_timeout_for_all_others(self, present: list[int], members: int) -> None:
        text = json.dumps(table(members))
        async with open_devices(members) as devices:
            with nothing_left(), lasting(3.3, at_least=0.3):
                name = next(names)
                ends = await asyncio.gather(
                    *(outcome(meet(devices[i], name, i, members, text, b"", 0.3)) for i in present)
                )
            assert [type(end) for end in ends] == [LinkTimeout] * len(present), ends
            assert len(await meeting(devices, name)) == members

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("how", ["task", "scope"])
    async def test_cancelled_while_it_waits(self, rank: int, how: str) -> None:
        name, scope = next(names), anyio.CancelScope()
        async with open_devices(2) as devices:
            with nothing_left():

                async def alone() -> None:
                    with scope:
                        await meet(devices[rank], name, rank, 2, json.dumps(table(2)), b"", limit)

                comms = soft_counters()["comms"]
                is_free = devices[rank].runtime.soft_strictness == 0
                limit = 100.0 if is_free else 1.0  # strict softnpu waits until HCCL gives up by itself, as on an NPU
                task = asyncio.create_task(alone())
                await waits(comms)
                if how == "task":
                    task.cancel()
                else:
                    scope.cancel()
                with lasting(1 if is_free else LIMIT):
                    await asyncio.wait([task])
                assert task.cancelled() == (how == "task")
            assert await meeting(devices, name, 5) == [{1: blob_of(1, 5)}, {0: blob_of(0, 5)}]


@pytest.mark.usefixtures("no_leaks")
class TestFailures:
    @pytest.mark.parametrize(
        ("members", "fault"),
        [
            (2, "HcclExchangeMemDesc:fail=4"),
            (2, "HcclExchangeMemDesc:fail=4@2"),
            (3, "HcclExchangeMemDesc:fail=4@3"),
            (4, "HcclExchangeMemDesc:fail=4@6"),
            (2, "HcclCommPrepare:fail=4"),
            (3, "HcclCommPrepare:fail=4@2"),
        ],
    )
    async def test_a_broken_exchange_fails_at_once_at_both_its_ends(self, members: int, fault: str) -> None:
        async with open_devices(members) as devices:
            name = next(names)
            with nothing_left(), soft_faults_cleared():
                soft_fault(fault)
                ends = await outcomes(devices, name, 1.0 if "Prepare" in fault else LIMIT)
            failed = [end for end in ends if isinstance(end, LLMException)]
            assert len(failed) >= 2
            assert all(isinstance(end, LinkError) for end in failed), ends
            assert len(await meeting(devices, name)) == members

    async def test_who_could_not_say_goodbye_has_met_all_the_same(self) -> None:
        """Two members make four exchanges: one each for the blobs, one each to part."""
        async with open_devices(2) as devices:
            with nothing_left(), soft_faults_cleared():
                soft_fault("HcclExchangeMemDesc:fail=4@3")
                assert await meeting(devices, next(names), 5) == [{1: blob_of(1, 5)}, {0: blob_of(0, 5)}]

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            ("HcclCommInitClusterInfoMemConfig:fail=4@*", LinkError),
            ("HcclCommInitClusterInfoMemConfig:fail=9@*", LinkTimeout),
            ("HcclCommPrepare:fail=9@*", LinkTimeout),
            ("HcclExchangeMemDesc:fail=4@*", LinkError),
        ],
    )
    async def test_every_refusal_gives_the_rest_back(self, fault: str, error: type[LLMException]) -> None:
        async with open_devices(2) as devices:
            name = next(names)
            with nothing_left(), soft_faults_cleared():
                soft_fault(fault)
                ends = await outcomes(devices, name, 1)
                assert all(isinstance(end, error) for end in ends), ends
            assert len(await meeting(devices, name)) == 2

    async def test_the_applications_own_communicator_is_not_in_the_way(self) -> None:
        """HCCL has one communicator of a rank table in a file for each device and process, and refuses a second."""
        async with open_devices(2) as devices:
            with nothing_left(), soft_faults_cleared():
                soft_fault("HcclCommInitClusterInfo:fail=7@*;HcclCommInitClusterInfoConfig:fail=7@*")
                assert len(await meeting(devices, next(names))) == 2

    async def test_members_that_disagree_do_not_meet(self) -> None:
        async with open_devices(2) as devices:
            name, text = next(names), json.dumps(table(2))
            twice = (meet(devices[i], name, 1, 2, text, b"", 0.3) for i in range(2))
            ends = await asyncio.gather(*(outcome(one) for one in twice))
            assert all(isinstance(end, LinkError) for end in ends), ends
            bad = json.dumps(table(1))
            with pytest.raises(LinkError, match="rank 1 is not in the rank table"):
                await meet(devices[0], name, 1, 2, bad, b"", 0.3)

    @pytest.mark.parametrize(
        ("name", "rank", "members", "blob", "match"),
        [
            ("", 0, 2, b"", "0 characters"),
            ("n" * 128, 0, 2, b"", "128 characters"),
            ("n", 0, 1, b"", "2 to 4"),
            ("n", 0, 5, b"", "2 to 4"),
            ("n", 2, 2, b"", "rank is 2: must be 0 to 1"),
            ("n", -1, 2, b"", "rank is -1: must be 0 to 1"),
            ("n", 0, 2, b"x" * (BLOB + 1), "504 bytes"),
            ("n", 0, 2, b"x\0", "zero"),
        ],
    )
    async def test_wrong_arguments(self, name: str, rank: int, members: int, blob: bytes, match: str) -> None:
        async with open_devices(1) as (device,):
            with nothing_left(), pytest.raises(ParamInvalid, match=match):
                await meet(device, name, rank, members, "{}", blob, LIMIT)


def changed(change: Callable[[Any], object], members: int = 2) -> str:
    made = table(members)
    change(made)
    return json.dumps(made)


class TestValidate:
    @pytest.mark.parametrize("version", ["1.0", "1.2"])
    @pytest.mark.parametrize("members", [2, 3, 4])
    def test_what_clients_pass(self, version: str, members: int) -> None:
        info = {10 * (i + 1): i for i in range(members)}
        text = json.dumps(table(members, version))
        assert validate("pd_comm_10.0.0.0_10.0.0.1", info, text, 20) == (1, info)
        assert validate("n" * 127, {2**64 - 1: 0, 0: 1}, json.dumps(table(2)), 0) == (1, {2**64 - 1: 0, 0: 1})

    @pytest.mark.parametrize(
        ("name", "info", "text", "error", "match"),
        [
            (None, None, None, TypeError, "comm_name"),
            (b"n", {1: 0, 2: 1}, "", TypeError, "comm_name"),
            ("", None, None, ParamInvalid, "0 characters"),
            ("n" * 128, None, None, ParamInvalid, "128 characters"),
            ("n\n", None, None, ParamInvalid, "printable ASCII"),
            ("\u00e4", None, None, ParamInvalid, "printable ASCII"),
            ("n", None, None, TypeError, "cluster_rank_info"),
            ("n", [(1, 0)], None, TypeError, "cluster_rank_info"),
            ("n", {"1": 0, 2: 1}, None, TypeError, "cluster id"),
            ("n", {1: "0", 2: 1}, None, TypeError, r"cluster_rank_info\[1\]"),
            ("n", {-1: 0, 2: 1}, None, ValueError, "uint64"),
            ("n", {2**64: 0, 2: 1}, None, ValueError, "uint64"),
            ("n", {1: 0, 2: 2**32}, None, ValueError, "uint32"),
            ("n", {1: -1, 2: 0}, None, ValueError, "uint32"),
            ("n", {}, None, ParamInvalid, "0 entries"),
            ("n", {1: 0}, None, ParamInvalid, "1 entries"),
            ("n", {i: i for i in range(5)}, None, ParamInvalid, "5 entries"),
            ("n", {1: 1, 2: 0}, None, ParamInvalid, "rank 0 after 1"),
            ("n", {1: 0, 2: 0}, None, ParamInvalid, "rank 0 after 0"),
            ("n", {1: 0, 2: 5}, None, ParamInvalid, r"ranks \[0, 5\]: must be 0 to 1 without a gap"),
            ("n", {1: 1, 2: 2}, None, ParamInvalid, r"ranks \[1, 2\]: must be 0 to 1 without a gap"),
            ("n", {3: 0, 2: 1}, None, ParamInvalid, "our own, 1,"),
            ("n", {1: 0, 2: 1}, None, TypeError, "rank_table"),
            ("n", {1: 0, 2: 1}, {}, TypeError, "rank_table"),
            ("n", {1: 0, 2: 1}, "", ParamInvalid, "not JSON"),
            ("n", {1: 0, 2: 1}, "[" * 60_000, ParamInvalid, "not JSON"),
            ("n", {1: 0, 2: 1}, '{"x": "\ud800"}', ParamInvalid, "not JSON"),
            ("n", {1: 0, 2: 1}, "[]", ParamInvalid, "no 'version'"),
            ("n", {1: 0, 2: 1}, '{"version": "1.1"}', ParamInvalid, "'1.1'"),
            ("n", {1: 0, 2: 1}, '{"version": 1.0}', ParamInvalid, "float"),
            ("n", {1: 0, 2: 1}, '{"version": "1.0"}', ParamInvalid, "no 'server_list'"),
            ("n", {1: 0, 2: 1}, '{"version": "1.0", "server_list": {}}', ParamInvalid, "an array"),
            ("n", {1: 0, 2: 1}, '{"version": "1.0", "server_list": [{}]}', ParamInvalid, r"\[0\] has no 'device'"),
            (
                "n",
                {1: 0, 2: 1},
                changed(lambda t: t["server_list"][0]["device"].append(1)),
                ParamInvalid,
                "no 'rank_id'",
            ),
            (
                "n",
                {1: 0, 2: 1},
                changed(lambda t: t["server_list"][0]["device"][1].update(rank_id=1)),
                ParamInvalid,
                "a string",
            ),
            (
                "n",
                {1: 0, 2: 1},
                changed(lambda t: t["server_list"][0]["device"][1].update(rank_id="one")),
                ParamInvalid,
                "in digits",
            ),
            (
                "n",
                {1: 0, 2: 1},
                changed(lambda t: t["server_list"][0]["device"].pop()),
                ParamInvalid,
                "rank 1, of cluster 2, not",
            ),
            (
                "n",
                {1: 0, 2: 1},
                changed(lambda t: t["server_list"][0]["device"][1].update(rank_id="0")),
                ParamInvalid,
                "rank 0, of cluster 1, 2 times",
            ),
            ("n", {1: 0, 2: 1}, json.dumps(table(3)), ParamInvalid, r"ranks \[2\]"),
        ],
    )
    def test_what_is_refused(self, name: Any, info: Any, text: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            validate(name, info, text, 1)


async def _member(name: str, text: str) -> None:
    async with await Device.open(1) as device:
        got = await meet(device, name, 1, 2, text, b"from there", LIMIT)
    sys.stdout.buffer.write(got[0])


if __name__ == "__main__":
    asyncio.run(_member(*sys.argv[1:]))
