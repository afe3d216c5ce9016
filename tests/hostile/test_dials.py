"""Offers that name a true cluster's id at other places: silent ones, many of them, and others that lead to the same engine.

A client's offer costs the worker dials. It must not cost another client's offer its link.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LinkTimeout, LLMClusterInfo, LLMStatusCode
from aiodatadist._adapters import dials, peer_links
from aiodatadist._adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist._adapters.peers import LOOPBACK, NotAPeer, Peers
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.regions import ALL_HEADS, Heads
from aiodatadist._cluster import dial
from aiodatadist._cluster.engine import Engine
from aiodatadist._cluster.link_table import LinkTable
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._testing.views import call_on_loop
from aiodatadist.testing import ChaosProxy, Cluster, cluster_info, inside, open_cluster, verify
from tests.adapters.kv_memory import Order, opaque_memory
from tests.adapters.test_links_of_orders import engine_of
from tests.hostile.test_offers import PROMPT, End, pull
from tests.hostile.test_unproved import Impostor, welcome
from tests.keys import proving

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KEY = "k" * 40
LINKED = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
SILENT = "127.0.0.7"


class Silence:
    """Hosts of 127.0.0.7 to 127.0.0.9 take no connection and refuse none.

    Attributes:
        under_way: places that are being dialled, in the order of the dials.
        most: so many of them at a time.
        order: all places that were dialled, in the order of the dials.
        slow: a port of other hosts that takes connections after :meth:`answer`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[tuple[str, int]] = []
        self.order: list[tuple[str, int]] = []
        self.most = self.begun = self.slow = 0
        self._answers = Released()
        self._changed = threading.Condition()
        connected: Callable[..., Awaitable[socket.socket]] = vars(dial)["connected"]

        async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
            self.order.append((host, port))
            if host not in {SILENT, "127.0.0.8", "127.0.0.9"}:
                if port == self.slow:
                    await self._answers.wait()
                return await connected(host, port, first)
            with self._changed:
                self.begun += 1
                self._changed.notify_all()
            self.under_way.append((host, port))
            self.most = max(self.most, len(self.under_way))
            try:
                await anyio.sleep_forever()
            finally:
                self.under_way.remove((host, port))
            raise AssertionError

        monkeypatch.setattr(dial, "connected", connect)

    def answer(self) -> None:
        self._answers.release()

    def wait_begun(self, count: int) -> None:
        """Wait until so many silent places have been dialled."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun >= count, 30), self.begun


class Released:
    """Holds tasks of a worker's event loop until a test releases them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = anyio.Event()

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._event.wait()

    def release(self) -> None:
        assert self._loop is not None, "nothing waits for it"
        self._loop.call_soon_threadsafe(self._event.set)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    return Silence(monkeypatch)


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def made(number: int, order: Order | None = None, heads: Heads = ALL_HEADS, **settings: Any) -> End:
            end = End(number, order, heads, **settings)
            stack.enter_context(closing(end.service))
            return end

        yield made


@asynccontextmanager
async def silent_listener() -> AsyncIterator[tuple[tuple[str, int], anyio.Event]]:
    """Listen, accept connections and send nothing. Yield the address and an event for the first connection."""
    came = anyio.Event()

    async def serve(client: anyio.abc.SocketStream) -> None:
        async with client:
            came.set()
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield ("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port)), came
        group.cancel_scope.cancel()


def at(cluster_id: int, place: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info(*place)
    return info


def engine(cluster: Cluster) -> Engine:
    return inside(cluster.datadist)


def table_of(cluster: Cluster) -> LinkTable:
    return engine(cluster).links


def links(cluster: Cluster) -> int:
    """Return how many links it has, those that are being made among them."""
    return len(table_of(cluster).current) + len(table_of(cluster).opening)


async def check_linked(decoder: Cluster, cache: Any, source: int) -> None:
    await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(source), cache, [1], [2])
    verify(decoder.memory(cache), cache, [(0, 2, source, 1)])


# ---- attempts at one cluster ----


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
@pytest.mark.parametrize("ids", [(1, 2), (2, 1)], ids=["to the smaller id", "to the larger id"])
async def test_an_attempt_at_a_silent_place_holds_up_no_attempt_at_the_true_one(
    ids: tuple[int, int], key: str | None, no_leaks: None
) -> None:
    async with (
        open_cluster(ids[0], **proving(key)) as prompt,
        open_cluster(ids[1], device_id=1, **proving(key)) as decoder,
        silent_listener() as (place, came),
        anyio.create_task_group() as tasks,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        found: list[LLMStatusCode] = []

        async def lie() -> None:
            found.append((await decoder.datadist.link_clusters([at(ids[0], place)], 60_000)).status)

        tasks.start_soon(lie)
        await came.wait()
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 20_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await check_linked(decoder, cache, ids[0])
        await wait_all_tasks_blocked()
        assert found == [LLMStatusCode.LLM_ALREADY_LINK], "what names no true place ends with the link"
        assert links(decoder) == 1


@pytest.mark.parametrize("ids", [(1, 2), (2, 1)], ids=["from the larger id", "from the smaller id"])
async def test_an_attempt_at_a_silent_place_does_not_keep_the_true_cluster_waiting(ids: tuple[int, int]) -> None:
    """The cluster itself asks for a link, while this end dials a place that does not answer under its id."""
    async with (
        open_cluster(ids[0]) as prompt,
        open_cluster(ids[1], device_id=1) as decoder,
        silent_listener() as (place, came),
        anyio.create_task_group() as tasks,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        found: list[LLMStatusCode] = []

        async def lie() -> None:
            found.append((await decoder.datadist.link_clusters([at(ids[0], place)], 60_000)).status)

        tasks.start_soon(lie)
        await came.wait()
        linked = await prompt.datadist.link_clusters([cluster_info(decoder)], 20_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await check_linked(decoder, cache, ids[0])
        await wait_all_tasks_blocked()
        assert found == [LLMStatusCode.LLM_ALREADY_LINK]


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_attempts_that_reach_one_cluster_by_several_ways_are_one_link(key: str | None, no_leaks: None) -> None:
    async with open_cluster(1, **proving(key)) as prompt, open_cluster(2, device_id=1, **proving(key)) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        address = prompt.datadist.listen_address
        assert address is not None
        async with ChaosProxy(address) as one, ChaosProxy(address) as two:
            for number in range(1, 6):
                found: list[LLMStatusCode] = []

                async def link(place: tuple[str, int], found: list[LLMStatusCode]) -> None:
                    found.append((await decoder.datadist.link_clusters([at(1, place)], 20_000)).status)

                async with anyio.create_task_group() as tasks:
                    for place in (one.address, two.address, address):
                        tasks.start_soon(link, place, found)
                assert set(found) <= LINKED, found
                assert found.count(LLMStatusCode.LLM_SUCCESS) == 1
                await check_linked(decoder, cache, 1)
                assert decoder.datadist.statistics().links[0].generation == number, "none was made and replaced"
                assert prompt.datadist.statistics().links[0].generation == number
                await table_of(prompt).wait_opened()  # it hears of the other connections' ends
                assert [links(cluster) for cluster in (prompt, decoder)] == [1, 1]
                await decoder.datadist.unlink_clusters([cluster_info(prompt)], 20_000)
                await table_of(prompt).wait_parted()


async def test_a_call_that_is_cancelled_leaves_the_others_alone() -> None:
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=1) as decoder,
        silent_listener() as (place, came),
        silent_listener() as (another, came_too),
        anyio.create_task_group() as tasks,
    ):
        calls = [
            asyncio.ensure_future(decoder.datadist.link_clusters([at(1, each)], 60_000)) for each in (place, another)
        ]
        await came.wait()
        await came_too.wait()
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert links(decoder) == 1, "nothing is left of it"
        again = await decoder.datadist.link_clusters([at(1, place)], 60_000)
        assert again.status is LLMStatusCode.LLM_PROCESSING_LINK, "the other attempt continues"
        tasks.start_soon(decoder.datadist.link_clusters, [cluster_info(prompt)], 20_000)
        assert (await calls[0]).status is LLMStatusCode.LLM_ALREADY_LINK


# ---- offers ----


def keep(owner: End, puller: End, name: str, **changes: Any) -> None:
    """Make an honest request: blocks that are kept, and pulled by an offer."""
    order = pull(name, owner.place(**changes))
    owner.service.keep(name, order.lease, [3], PROMPT)
    puller.service.pull(order)


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
def test_offers_of_silent_places_under_a_true_id_cost_the_honest_ones_nothing(
    ends: Callable[..., End], silence: Silence, key: str | None, tmp_path: Path
) -> None:
    settings = trusted(tmp_path, key)
    true, puller = ends(0, **settings), ends(1, **settings)
    for number, host in enumerate((SILENT, "127.0.0.8", "127.0.0.9")):
        puller.service.pull(pull(f"lie{number}", true.place(host=host)))
    silence.wait_begun(3)
    puller.pass_turns()
    assert len(silence.under_way) == 3
    keep(true, puller, "honest")
    assert puller.received("honest").failed == {}
    puller.pass_turns()
    assert puller.service.take().received == set(), "an offer that is wrong about the place does not use the link"


def trusted(folder: Path, key: str | None) -> dict[str, Any]:
    if key is None:
        return {"peers": ["127.0.0.0/8"], "trust": "none"}
    file = folder / "key"
    file.write_text(key)
    file.chmod(0o600)
    return {"peers": ["127.0.0.0/8"], "auth_key_file": file}


def test_dials_that_get_no_answer_are_few_and_the_oldest_gives_way(ends: Callable[..., End], silence: Silence) -> None:
    true, puller = ends(0), ends(1, link_seconds=20)
    for number in range(300):
        puller.service.pull(pull(f"lie{number}", true.place(host=SILENT, port=1 + number)))
    keep(true, puller, "honest")
    found = puller.received("honest")
    assert found.outcomes["honest"] == "pull_done"
    assert silence.most == 64
    puller.pass_turns()
    first, last = silence.under_way[0], silence.under_way[-1]
    assert (first[1], last[1], len(silence.under_way)) == (1 + 237, 1 + 299, 63), "the oldest gave way"


def test_a_dial_that_has_just_begun_gives_way_to_none(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offers of one step come at the same moment, and the honest one among them is the oldest."""
    true, puller, ticked, tick = ends(0), ends(1, link_seconds=20), threading.Semaphore(0), dials.Dials.tick

    def counted(self: dials.Dials) -> None:
        tick(self)
        ticked.release()

    monkeypatch.setattr(dials, "SILENT_TICKS", 10**9)
    monkeypatch.setattr(dials.Dials, "tick", counted)
    silence.slow = true.address.port
    keep(true, puller, "honest")
    for number in range(300):
        puller.service.pull(pull(f"lie{number}", true.place(host=SILENT, port=1 + number)))
    silence.wait_begun(63)
    for _ in range(2):  # in which the oldest would give way, while its place has not answered
        assert ticked.acquire(timeout=30)
    puller.pass_turns()
    assert silence.most == 63
    silence.answer()
    assert puller.received("honest").outcomes["honest"] == "pull_done"


def test_a_place_that_was_linked_before_waits_for_no_other_dial(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, puller = ends(0), ends(1, link_seconds=20)
    keep(true, puller, "first")
    assert puller.received("first").failed == {}
    break_links(puller)
    monkeypatch.setattr(dials, "DIALS", 0)
    puller.service.pull(pull("lie", true.place(host=SILENT)))
    keep(true, puller, "second")
    assert puller.received("second").failed == {}
    assert silence.begun == 0, "there was no room for others"


def break_links(end: End) -> None:
    async def part() -> None:
        for link in engine_of(end.service).links.current:
            await link.disconnect("a test", 5)
            await link.wait_closed()

    call_on_loop(end.service, part)


def test_a_push_dials_few_of_its_replicas_at_a_time(ends: Callable[..., End], silence: Silence) -> None:
    """Name many workers of a prefill engine, all of which have the same: each had a place in the line of its own."""
    puller = ends(1, link_seconds=1, pull_seconds=600)
    places = [
        PeerAddress(cluster_id=number, host=f"127.0.0.{7 + number % 3}", port=26000 + number) for number in range(1, 25)
    ]
    order = ExpectOrder("r", places[0], "t", 0, (3,), prompt=PROMPT, workers=24)
    for each in (order, *order.at_replicas(places[1:])):
        puller.service.expect(each)
    silence.wait_begun(8)
    puller.pass_turns()
    assert silence.most == 8
    silence.wait_begun(24)
    assert silence.most == 8
    puller.service.cancel("r")
    assert puller.received("r").outcomes["r"] in {"push_missed", "push_cancelled"}


def test_a_push_that_is_cancelled_dials_none_of_its_replicas_that_wait(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_links, "SPARE", 0)
    puller = ends(1, link_seconds=60, pull_seconds=600)
    places = [PeerAddress(cluster_id=number, host=SILENT, port=26000 + number) for number in range(1, 25)]
    order = ExpectOrder("r", places[0], "t", 0, (3,), prompt=PROMPT, workers=24)
    for each in (order, *order.at_replicas(places[1:])):
        puller.service.expect(each)
    silence.wait_begun(8)
    puller.service.cancel("r")
    assert puller.received("r").outcomes["r"] == "push_cancelled"
    puller.pass_turns()
    assert silence.begun == 8
    puller.service.expect(order)
    puller.service.cancel("r")
    assert puller.received("r").outcomes["r"] == "push_cancelled", "nothing of the first order is left"


def test_an_offer_dials_few_of_its_workers_at_a_time(ends: Callable[..., End], silence: Silence) -> None:
    """A worker that has all heads pulls from 64 that have one each."""
    order: Order = ("tokens", "heads", 4)
    end = ends(0, order, Heads(0, 64, 64), link_seconds=20)
    said = [opaque_memory(16, order, Heads(number, number + 1, 64)).model_dump() for number in range(64)]
    workers = [end.place(host=SILENT, cluster_id=100 + number, memory=said[number]) for number in range(64)]
    end.service.pull(pull("r", *workers))
    silence.wait_begun(8)
    end.pass_turns()
    assert silence.most == len(silence.under_way) == 8


# ---- places of one cluster ----


@asynccontextmanager
async def linked_by_another_way(
    key: str | None,
) -> AsyncIterator[tuple[PeerLinks, Cluster, PeerAddress, PeerAddress]]:
    """Link a worker to a cluster through a forwarder that a client's offer named. Yield both addresses."""
    async with (
        open_cluster(1, **proving(key)) as prompt,
        open_cluster(2, device_id=1, **proving(key)) as decoder,
        anyio.create_task_group() as group,
    ):
        address = prompt.datadist.listen_address
        assert address is not None
        links = PeerLinks(decoder.datadist, Spawner(group), 5, lambda _: None, Peers(LOOPBACK))
        async with ChaosProxy(address) as proxy:
            true, forwarder = (
                PeerAddress(cluster_id=1, host=host, port=port) for host, port in (address, proxy.address)
            )
            await links.link(forwarder, "r")
            yield links, prompt, true, forwarder
            group.cancel_scope.cancel()


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_a_link_by_another_way_to_the_same_cluster_serves_those_who_name_the_true_one(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_by_another_way(key) as (links, prompt, true, forwarder):
        dialled = count_dials(monkeypatch)
        linked = await links.link(true, "r")
        assert await links.link(forwarder, "r") == linked
        assert await links.link(true, "r") == linked
        assert prompt.datadist.statistics().links[0].generation == 1, "the link continues"
        assert dialled == [true.place], "once for each place of a link"


async def test_a_place_that_is_in_use_is_not_the_one_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers that name one place after the other do not make an honest engine's place be dialled again."""
    monkeypatch.setattr(peer_links, "MAX_PLACES", 2)
    async with linked_by_another_way(KEY) as (links, _, true, _), AsyncExitStack() as stack:
        others = [await stack.enter_async_context(ChaosProxy((true.host, true.port))) for _ in range(4)]
        dialled = count_dials(monkeypatch)
        await links.link(true, "r")
        for number, other in enumerate(others, 1):
            await links.link(PeerAddress(cluster_id=1, host=other.address[0], port=other.address[1]), "r")
            await links.link(true, "r")
            assert len(dialled) == 1 + number
        assert dialled.count(true.place) == 1


async def test_a_place_where_another_cluster_listens_is_none_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_by_another_way(KEY) as (links, _, true, _), open_cluster(3, device_id=2, auth_key=KEY) as other:
        assert other.datadist.listen_address is not None
        host, port = other.datadist.listen_address
        with pytest.raises(NotAPeer, match=f"not to 127.0.0.1:{port}: .*cluster 1 was asked for, 3 answered"):
            await links.link(PeerAddress(cluster_id=1, host=host, port=port), "r")
        await links.link(true, "r")


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_a_place_where_another_instance_says_the_same_id_is_none_of_a_link(key: str | None) -> None:
    async with linked_by_another_way(key) as (links, _, true, _):
        async with open_cluster(3, device_id=2, **proving(key)) as other:
            inside(other.datadist).cluster_id = 1
            assert other.datadist.listen_address is not None
            host, port = other.datadist.listen_address
            with pytest.raises(NotAPeer, match="another instance of cluster 1 listens there"):
                await links.link(PeerAddress(cluster_id=1, host=host, port=port), "r")
        await links.link(true, "r")


async def test_a_place_is_not_the_clusters_without_the_key() -> None:
    """The process that listens there cannot confirm the key."""
    async with linked_by_another_way(KEY) as (links, _, true, _):
        impostor = Impostor(welcome())
        async with impostor.at(0) as port:
            with pytest.raises(NotAPeer, match=f"not to 127.0.0.1:{port}: .*does not have this end's key"):
                await links.link(PeerAddress(cluster_id=1, host="127.0.0.1", port=port), "r")
        await links.link(true, "r")


async def test_a_silent_place_is_none_of_a_link(silence: Silence) -> None:
    async with linked_by_another_way(None) as (links, _, true, _):
        silent = asyncio.ensure_future(links.link(PeerAddress(cluster_id=1, host=SILENT, port=26000), "r"))
        await wait_all_tasks_blocked()
        assert silence.under_way == [(SILENT, 26000)]
        await links.link(true, "r")
        assert not silent.done()
        silent.cancel()
        await asyncio.wait([silent])


async def test_a_place_that_failed_is_dialled_by_the_next_order() -> None:
    """Dial the place again: its engine may have started meanwhile."""
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder, anyio.create_task_group() as group:
        address = prompt.datadist.listen_address
        assert address is not None
        links = PeerLinks(decoder.datadist, Spawner(group), 5, lambda _: None, Peers(LOOPBACK))
        place = PeerAddress(cluster_id=1, host=address[0], port=address[1])
        await engine(prompt).listen_elsewhere(None)
        for _ in range(3):
            with pytest.raises(LinkTimeout, match="Connection refused"):
                await links.link(place, "r")
        await engine(prompt).listen_elsewhere(address)
        await links.link(place, "r")
        group.cancel_scope.cancel()


def count_dials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    dialled: list[str] = []
    connected: Callable[..., Awaitable[socket.socket]] = vars(dial)["connected"]

    async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
        dialled.append(f"{host}:{port}")
        return await connected(host, port, first)

    monkeypatch.setattr(dial, "connected", connect)
    return dialled
