"""A peer may be named by its host. The name is looked up for each link, so a peer may move."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from aiodatadist import LinkError, LinkPhase, LLMClusterInfo, LLMStatusCode
from aiodatadist._cluster import dial, host_names
from aiodatadist._link import connected
from aiodatadist._values import peer_budget
from aiodatadist._values.addresses import is_address
from aiodatadist.testing import Cluster, inside, open_cluster
from tests import children
from tests.test_relink import QUICK, cut, until

pytestmark = pytest.mark.timeout(60)

NAME = "prefill-0.prefill"


def answer(addresses: list[str]) -> list[Any]:
    """Return addresses as ``socket.getaddrinfo`` does."""
    families = {4: socket.AF_INET, 6: socket.AF_INET6}
    return [
        (families[ipaddress.ip_address(each).version], socket.SOCK_STREAM, 6, "", (each, 0, 0, 0)) for each in addresses
    ]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the addresses that the name service knows of every name. If it is empty, no name is known."""
    addresses: list[str] = []

    def look_up(host: str, port: int | None, **_: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answer(addresses)

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    return addresses


class Silent:
    """A name service that answers when it is let go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.let_go = threading.Event()

    def __call__(self, host: str, port: int | None, **_: Any) -> list[Any]:
        self.asked.append(host)
        self.let_go.wait(30)
        return answer(["127.0.0.1"])


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    service = Silent()
    monkeypatch.setattr(host_names, "getaddrinfo", service)
    yield service
    service.let_go.set()


def is_idle(names: host_names.HostNames) -> bool:
    return not names._rooms and names._all.is_idle


def named(cluster: Cluster, name: str = NAME) -> LLMClusterInfo:
    """Return the port of a cluster at a host of this name."""
    assert cluster.datadist.listen_address is not None
    info = LLMClusterInfo(cluster.datadist.cluster_id)
    info.append_remote_ip_info(name, cluster.datadist.listen_address[1])
    return info


async def test_a_peer_is_reached_by_the_name_of_its_host() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt, "localhost")])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await decoder.datadist.check_link_status(1)


async def test_heartbeats_go_where_the_link_goes(known: list[str]) -> None:
    """The first address of the name takes no connection. Without heartbeats the link would not be made."""
    known += ["127.0.0.9", "127.0.0.1"]
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors


async def test_an_address_that_does_not_answer_holds_up_the_next_one_no_longer_than_said(
    known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known += ["127.0.0.9", "127.0.0.1"]
    silent = list[str]()

    async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
        if host == "127.0.0.9":
            silent.append(host)
            await anyio.sleep_forever()
        return await connected(host, port, first)

    monkeypatch.setattr("aiodatadist._cluster.dial.connected", connect)
    monkeypatch.setattr(dial, "ONE_OF_MANY_SECONDS", 0.05)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        with anyio.fail_after(15):  # half of the time would be 30 s
            linked = await decoder.datadist.link_clusters([named(prompt)], 60_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        assert silent == ["127.0.0.9"]


async def test_where_no_address_takes_a_connection_each_is_told(known: list[str]) -> None:
    known += ["127.0.0.8", "127.0.0.9", "127.0.0.8"]
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        (error,) = linked.errors
        assert isinstance(error, LinkError)
        assert f"no cluster can be reached at {NAME}:" in str(error)
        assert str(error).count("127.0.0.8: ") == str(error).count("127.0.0.9: ") == 1


async def test_a_name_that_is_not_found_is_named(known: list[str]) -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        told = str(linked.errors[0])
        assert f"{NAME}:" in told
        assert "the host name is not found: Name or service not known" in told


async def test_a_link_is_made_again_where_the_name_leads_by_then(known: list[str]) -> None:
    """Look the name up again, as of a pod that has been started again elsewhere."""
    known.append("127.0.0.1")
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1, relink=QUICK) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        engine, (_, port) = inside(prompt.datadist), prompt.datadist.listen_address or ("", 0)
        changes = decoder.datadist.link_changes()
        await engine.listen_elsewhere(("127.0.0.2", port))
        known[:] = ["127.0.0.2"]
        await cut(prompt)
        told = await until(changes, LinkPhase.LOST)
        told += await until(changes, LinkPhase.LINKED)
        assert told[-1].generation == 2


async def test_another_cluster_at_a_name_is_not_the_end_of_it(known: list[str]) -> None:
    """The name service may be behind: another pod has the address by now."""
    known.append("127.0.0.1")
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=1, relink=QUICK) as decoder,
        open_cluster(3, device_id=2) as other,
    ):
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        _, port = prompt.datadist.listen_address or ("", 0)
        changes = decoder.datadist.link_changes()
        await inside(prompt.datadist).listen_elsewhere(("127.0.0.2", port))
        await inside(other.datadist).listen_elsewhere(("127.0.0.1", port))
        await cut(prompt)
        told = ""
        with anyio.fail_after(20):
            while "3 answered" not in told:
                change = (await until(changes, LinkPhase.RELINKING, LinkPhase.GIVEN_UP))[-1]
                assert change.state is LinkPhase.RELINKING
                told = str(change.reason)
        known[:] = ["127.0.0.2"]
        assert (await until(changes, LinkPhase.LINKED, LinkPhase.GIVEN_UP))[-1].generation == 2


async def test_giving_up_while_a_name_is_looked_up_takes_no_time(silent: Silent) -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linking = asyncio.ensure_future(decoder.datadist.link_clusters([named(prompt)]))
        await wait_all_tasks_blocked()
        linking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await linking
        linked = await decoder.datadist.link_clusters([named(prompt)], 50)
        assert linked.status is LLMStatusCode.LLM_TIMEOUT
        assert silent.asked == [NAME]  # the question that is under way is for both
        assert "was not linked within 0.05 s: the name service did not answer" in str(linked.errors[0])


async def test_an_answer_that_comes_too_late_is_the_next_attempts(silent: Silent) -> None:
    """Else a name service that is slower than the caller's patience never helps; and there is one question for all."""
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        for _ in range(3):
            linked = await decoder.datadist.link_clusters([named(prompt)], 20)
            assert linked.status is LLMStatusCode.LLM_TIMEOUT
        silent.let_go.set()
        linked = await decoder.datadist.link_clusters([named(prompt)], 5000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        assert silent.asked == [NAME]
        assert await inside(decoder.datadist).initiator.host_names.addresses_of("another") == ["127.0.0.1"]
        assert silent.asked == [NAME, "another"]


async def test_names_without_an_answer_hold_up_no_other_name_and_no_thread_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Silent()

    def look_up(host: str, port: int | None, **words: Any) -> list[Any]:
        return answer(["127.0.0.1"]) if host == NAME else service(host, port, **words)

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    try:
        async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
            silent = {}
            for number in range(40):  # more than the event loop's own threads, which are 32 at most
                silent[f"silent-{number}"] = info = LLMClusterInfo(100 + number)
                info.append_remote_ip_info(f"silent-{number}", 26000)
            while waiting := [silent[name] for name in silent.keys() - set(service.asked)]:
                linked = await decoder.datadist.link_clusters(
                    waiting, 50
                )  # some may time out before they are asked for
                assert set(linked.statuses) == {LLMStatusCode.LLM_TIMEOUT}
            linked = await decoder.datadist.link_clusters([named(prompt)], 20_000)
            assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
            assert await asyncio.to_thread(int) == 0
            assert len(service.asked) == 40, "each once"
    finally:
        service.let_go.set()


def test_a_name_without_an_answer_holds_up_no_end_of_a_process() -> None:
    program = """
import asyncio, threading
from aiodatadist import LLMClusterInfo
from aiodatadist._cluster import host_names
from aiodatadist.testing import open_cluster

host_names.getaddrinfo = lambda *_, **__: threading.Event().wait()

async def main():
    async with open_cluster(1) as cluster:
        info = LLMClusterInfo(2)
        info.append_remote_ip_info("silent", 26000)
        print((await cluster.datadist.link_clusters([info], 100)).status.name)

asyncio.run(main())
"""
    done = children.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "LLM_TIMEOUT\n")
    assert "the name service did not answer" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.autojump
async def test_addresses_share_the_time_that_is_left(known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second for each, a peer at the second address was never reached within less."""
    known += ["127.0.0.9", "127.0.0.1"]

    async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
        if host == "127.0.0.9":
            await anyio.sleep_forever()
        return await connected(host, port, first)

    monkeypatch.setattr("aiodatadist._cluster.dial.connected", connect)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)], 900)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors


@pytest.mark.parametrize("error", [UnicodeError("no such label"), None], ids=["raises", "knows none"])
async def test_a_name_service_that_does_what_it_must_not_is_told(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        if error is not None:
            raise error
        return []

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    with pytest.raises(socket.gaierror, match="the name has no address" if error is None else "no such label"):
        await host_names.HostNames().addresses_of(NAME)


async def test_one_name_waits_for_another_where_there_is_no_room(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_budget, "ALL_LOOK_UPS", 1)
    names, waits_for = host_names.HostNames(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(names.addresses_of("first"))
        second = group.create_task(names.addresses_of("second", waits_for.append))
        await wait_all_tasks_blocked()
        assert waits_for == ["1 other names were being looked up"]
        silent.let_go.set()
    assert second.result() == ["127.0.0.1"]
    assert silent.asked == ["first", "second"]


async def test_an_answer_without_an_asker_is_kept_for_a_while_and_a_failure_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_names, "KEPT_SECONDS", 0.0)
    asked, looking, let_go = list[str](), threading.Semaphore(0), threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        looking.release()
        let_go.wait(30)
        if host == "fails" and len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return answer(["127.0.0.1"])

    forget, forgotten = host_names.HostNames._forget, asyncio.Event()

    def forget_and_tell(*words: Any) -> None:
        forget(*words)
        forgotten.set()

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    monkeypatch.setattr(host_names.HostNames, "_forget", forget_and_tell)
    names = host_names.HostNames()
    for name in ("fails", "answers"):
        let_go.clear()
        forgotten.clear()
        waiter = asyncio.create_task(names.addresses_of(name))
        await asyncio.to_thread(looking.acquire)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        let_go.set()
        with anyio.fail_after(20):
            await forgotten.wait()
        assert await names.addresses_of(name) == ["127.0.0.1"]
    assert asked == ["fails", "fails", "answers", "answers"]


async def test_a_link_local_address_keeps_its_network_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 2))]

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    (address,) = await host_names.HostNames().addresses_of(NAME)
    assert address == "fe80::1%2"
    assert is_address(address)


async def test_silent_names_of_one_peer_delay_no_other_peer_s_look_up(silent: Silent) -> None:
    names = host_names.HostNames()
    async with asyncio.TaskGroup() as group:
        liars = [group.create_task(names.addresses_of(f"silent{i}", share=7)) for i in range(64)]
        await wait_all_tasks_blocked()
        asked = names._asked
        assert len(asked) == peer_budget.LOOK_UPS
        group.create_task(names.addresses_of("localhost", share=8))
        await wait_all_tasks_blocked()
        assert "localhost" in asked
        for each in liars[:8]:
            each.cancel()
        await wait_all_tasks_blocked()
        assert {f"silent{i}" for i in range(16)} <= asked.keys(), "a place is free when no task waits"
        silent.let_go.set()
    assert is_idle(names)


class Threads:
    """Counts threads that look something up; none of these names gets an answer, but for those that are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answered: set[str]) -> None:
        self.begun, self.let_go, self.answered = 0, threading.Event(), answered
        thread = vars(host_names)["DaemonThread"]

        def start(*args: Any) -> Any:
            self.begun += 1
            return thread(*args)

        def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
            if host not in self.answered:
                self.let_go.wait(30)
            return answer(["127.0.0.1"])

        monkeypatch.setattr(host_names, "DaemonThread", start)
        monkeypatch.setattr(host_names, "getaddrinfo", look_up)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    counted = Threads(monkeypatch, {"localhost", "known"})
    yield counted
    counted.let_go.set()


async def give_up_after_asking(names: host_names.HostNames, host: str, peer: int) -> None:
    with anyio.CancelScope() as scope:
        await names.addresses_of(host, lambda what: scope.cancel() if "name service" in what else None, peer)


@pytest.mark.parametrize("is_one_peer", [True, False], ids=["of one peer", "of many peers"])
async def test_names_without_an_answer_take_few_threads_also_when_no_task_waits_for_them(
    threads: Threads, is_one_peer: bool
) -> None:
    names = host_names.HostNames()
    limit = peer_budget.THREADS_OF_LOOK_UP * peer_budget.LOOK_UPS if is_one_peer else peer_budget.LOOK_UP_THREADS
    assert await names.addresses_of("known", share=7) == ["127.0.0.1"]
    threads.begun = 0
    for number in range(limit):
        await give_up_after_asking(names, f"silent{number}", 7 if is_one_peer else number)
    assert threads.begun == limit
    more = [
        asyncio.ensure_future(names.addresses_of(f"more{number}", share=7 if is_one_peer else number))
        for number in range(200)
    ]
    await wait_all_tasks_blocked()
    assert threads.begun == limit, "each thread is held by a question that cannot be taken back"
    for host in ("127.0.0.1", "::1"):
        assert await names.addresses_of(host, share=7) == [host]
    with anyio.fail_after(10):
        for host in ("localhost", "known"):
            assert await names.addresses_of(host, share=7) == ["127.0.0.1"]
        if is_one_peer:
            threads.answered.add("another")
            assert await names.addresses_of("another", share=8) == ["127.0.0.1"]
    threads.let_go.set()
    assert await asyncio.gather(*more) == [["127.0.0.1"]] * 200
    assert is_idle(names)
