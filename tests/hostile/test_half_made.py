"""Peers that prove their key and stop in the middle of linking: they do not use up what other links need."""

from __future__ import annotations

import itertools
import resource
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aiodatadist import LinkTimeout, LLMClusterInfo, LLMException, LLMStatusCode
from aiodatadist._cluster import half_links, link_table
from aiodatadist._cluster.dial import Steps
from aiodatadist._cluster.half_links import HalfLinks
from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._concurrency.signal import Signal
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import Accept, Connect, Hello, Hello1, Refuse
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, soft_faults_cleared, soft_hold
from tests.clock import took
from tests.held import turns
from tests.hostile.test_strangers import KEY, Client, client_of, link
from tests.unit.wire.examples import vouching

FEW = 3
"""Links that may be being made at a time, here."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_links, "MAX_HALF_LINKS", FEW)
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 0.0)


def hello_of(cluster: Cluster, cluster_id: int) -> Hello:
    """Return what another cluster on the same machine says first."""
    mine = inside(cluster.datadist).hello(True, None)
    end = mine.endpoint.model_copy(update={"process": 1, "device_id": "7"})
    named = {"cluster_id": cluster_id, "instance": secrets.token_hex(32), "nonce": secrets.token_hex(32)}
    return mine.model_copy(update={**named, "endpoint": end})


async def ask(cluster: Cluster, client: Client, cluster_id: int) -> None:
    """Prove the key as this cluster, and ask for a link."""
    await client.prove(KEY)
    await client.say(hello_of(cluster, cluster_id), Connect(channel=f"c{cluster_id}", timeout=60))
    assert isinstance(await client.hear(), Hello)


async def stop_half_way(cluster: Cluster, client: Client, cluster_id: int) -> None:
    """Come as far as the accept, and no further."""
    await ask(cluster, client, cluster_id)
    assert isinstance(await client.hear(), Accept)


class Silence:
    """A listener with the key on all loopback addresses: at 127.0.1.N it is cluster N, accepts each link, and is silent then.

    Attributes:
        accepted: how many links.
        refusals: why they ended.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.port = self.accepted = 0
        self.refusals: list[str] = []
        self._news = Signal()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            client, host = Client(stream), stream.extra(anyio.abc.SocketAttribute.local_address)[0]
            first = await client.hear()
            assert isinstance(first, Hello1)
            if first.opens == "heartbeats":
                await anyio.sleep_forever()
            await client.welcome(KEY, first=first)
            handshake = Handshake("server", hello_of(self._cluster, int(host.rpartition(".")[2])), vouching)
            while handshake.connect is None:
                await client.say(*handshake.receive(await client.hear()))
            self.accepted += 1
            self._news.wake()
            last = await client.hear()
            assert isinstance(last, Refuse)
            self.refusals.append(last.reason)

    async def wait_accepted(self, count: int) -> None:
        while self.accepted < count:
            await self._news.wait()

    def at(self, number: int) -> LLMClusterInfo:
        info = LLMClusterInfo(number)
        info.append_remote_ip_info(f"127.0.1.{number}", self.port)
        return info


@asynccontextmanager
async def silence(cluster: Cluster) -> AsyncIterator[Silence]:
    """Serve a silent place on the machine of ``cluster``, under other ids."""
    silent = Silence(cluster)
    async with await anyio.create_tcp_listener(local_host="0.0.0.0") as listener, anyio.create_task_group() as group:
        silent.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        group.start_soon(listener.serve, silent.serve)
        yield silent
        group.cancel_scope.cancel()


def calls() -> int:
    """Return how many threads are in a blocking call."""
    return sum(thread.name == "aiodatadist call" for thread in threading.enumerate())


# ---- links that this end asks for ----


async def test_peers_that_stop_half_way_cost_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that asks for one more link waits, and names the limit if it waits in vain."""
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 1e6)
    async with (
        open_cluster(90, auth_key=KEY) as cluster,
        silence(cluster) as silent,
        anyio.create_task_group() as group,
    ):
        for number in range(1, 7):
            group.start_soon(cluster.datadist.link_clusters, [silent.at(number)], 60_000)
        await silent.wait_accepted(FEW)
        await turns(200)
        assert silent.accepted == FEW
        assert len(inside(cluster.datadist).links.opening) == FEW
        while calls() < FEW:
            await anyio.lowlevel.checkpoint()
        linked = await cluster.datadist.link_clusters([silent.at(7)], 100)
        assert linked.status is LLMStatusCode.LLM_TIMEOUT
        assert "at most 3 links are made at a time" in str(linked.errors[0])
        group.cancel_scope.cancel()
    while calls():  # the last ones are just ending
        await anyio.lowlevel.checkpoint()


async def test_a_peer_that_stops_half_way_gives_way_to_one_that_links() -> None:
    async with (
        open_cluster(90, auth_key=KEY) as prompt,
        open_cluster(91, device_id=1, auth_key=KEY) as decoder,
        silence(decoder) as silent,
        anyio.create_task_group() as group,
    ):
        errors: list[LLMException | None] = []

        async def link_silent(number: int) -> None:
            errors.extend((await decoder.datadist.link_clusters([silent.at(number)], 60_000)).errors)

        for number in range(1, FEW + 1):
            group.start_soon(link_silent, number)
            await silent.wait_accepted(number)
        await link(decoder, prompt)
        while not errors:
            await anyio.lowlevel.checkpoint()
        assert len(errors) == 1
        assert isinstance(errors[0], LinkTimeout)
        assert "at most 3 links are made at a time" in str(errors[0])
        assert silent.refusals == ["cluster 91 no longer waits"]
        group.cancel_scope.cancel()


class Limited(Steps):
    """Steps of a caller that limits how many of its attempts are connecting."""

    are_limited = True


@pytest.mark.autojump
async def test_an_attempt_that_has_room_says_what_it_waits_for_then() -> None:
    """A place that keeps the connection is no lack of room."""
    async with open_cluster(90, auth_key=KEY) as cluster, silence(cluster) as silent:
        place = "127.0.1.1", silent.port
        with pytest.raises(
            LinkTimeout, match=f"{place[0]}:{place[1]} is cluster 1, but the two did not open a channel"
        ):
            await inside(cluster.datadist).initiator.link(place, 1, 2, steps=Limited(1))


# ---- links that peers ask for ----


async def test_half_made_links_take_no_room_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_table, "MAX_LINKS", 1)
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as decoder,
        AsyncExitStack() as stack,
    ):
        for number in range(FEW):
            await stop_half_way(prompt, await stack.enter_async_context(client_of(prompt)), 100 + number)
        await link(decoder, prompt)


async def test_the_oldest_half_made_link_gives_way_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_cluster(1, auth_key=KEY) as cluster, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(cluster)) for _ in range(FEW + 1)]
        for number, client in enumerate(clients):
            await stop_half_way(cluster, client, 100 + number)
        assert isinstance(refused := await clients[0].hear(), Refuse)
        assert refused.reason == "cluster 1 no longer waits"
        assert len(inside(cluster.datadist).links.opening) == FEW


async def test_nothing_is_kept_of_the_ids_of_links_that_were_never_made() -> None:
    """A peer can invent any number of ids, each for one link."""
    async with open_cluster(1, auth_key=KEY) as cluster:
        links = inside(cluster.datadist).links
        async with client_of(cluster) as client:
            await stop_half_way(cluster, client, 100)
            assert dict(links.coming) == {100: 1}
        while links.opening:
            await links.news.wait()
        assert dict(links.coming) == {}


async def test_a_client_that_waits_for_room_makes_room_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a peer could keep as many connections as it likes."""
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 1e6)
    async with open_cluster(1, auth_key=KEY, quotas={"unproved": 2}) as cluster, AsyncExitStack() as stack:
        for number in range(FEW):
            await stop_half_way(cluster, await stack.enter_async_context(client_of(cluster)), 100 + number)
        waiting: list[Client] = []
        for number in range(3):
            waiting.append(await stack.enter_async_context(client_of(cluster)))
            await ask(cluster, waiting[-1], 200 + number)
        assert isinstance(refused := await waiting[0].hear(), Refuse)
        assert refused.reason == "cluster 1 no longer waits"


async def test_the_limit_of_links_is_said_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_table, "MAX_LINKS", 1)
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as decoder,
        open_cluster(3, device_id=2, auth_key=KEY) as late,
        client_of(prompt) as client,
    ):
        await stop_half_way(prompt, client, 100)
        await link(decoder, prompt)
        refused = await late.datadist.link_clusters([cluster_info(prompt)], 5000)
        assert "1 links: the limit is 1" in str(refused.errors[0])


async def test_of_links_that_are_made_at_the_same_time_as_many_are_kept_as_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_table, "MAX_LINKS", 1)
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as first,
        open_cluster(3, device_id=2, auth_key=KEY) as second,
        anyio.create_task_group() as group,
    ):
        refused: list[LLMException | None] = []

        async def link_first() -> None:
            refused.extend((await first.datadist.link_clusters([cluster_info(prompt)], 30_000)).errors)

        with soft_faults_cleared(), soft_hold("HcclCommPrepare") as hold:
            group.start_soon(link_first)
            await hold.arrived()
            await link(second, prompt)
            hold.release()
            while not refused:
                await anyio.lowlevel.checkpoint()
        assert "1 links: the limit is 1" in str(refused[0])


# ---- which one gives way ----


async def test_the_place_with_most_links_gives_way_and_places_take_turns() -> None:
    made, left = HalfLinks(), list[str]()
    entered: list[str] = []
    async with anyio.create_task_group() as group:

        async def make(host: str) -> None:
            with anyio.CancelScope() as scope:
                async with made.room_for(host, scope.cancel):
                    entered.append(host)
                    await anyio.sleep_forever()
            left.append(host)

        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.2"):
            group.start_soon(make, host)
        await turns()
        for host in ("10.0.0.3", "10.0.0.3", "10.0.0.4"):
            group.start_soon(make, host)
        await turns()
        assert left[0] == "10.0.0.2"
        assert entered[3:] == ["10.0.0.3", "10.0.0.4", "10.0.0.3"]
        assert (len(made), made.displaced) == (FEW, len(left))
        group.cancel_scope.cancel()
    assert len(made) == 0


async def test_links_give_way_one_in_each_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were as many as wait chosen at once, a hundred of them would hold the loop for milliseconds."""
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 1e6)
    made, gone = HalfLinks(), list[int]()
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for number in range(FEW):
            await stack.enter_async_context(made.room_for("10.0.0.1", partial(gone.append, number)))
        for _ in range(FEW):
            group.start_soon(made.room_for("10.0.0.2", lambda: None).__aenter__)
        await turns()
        monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 0.0)
        group.start_soon(made.room_for("10.0.0.2", lambda: None).__aenter__)  # the first in the line looks again
        chosen = [made.displaced]
        while len(gone) < FEW:
            await anyio.lowlevel.checkpoint()
            chosen.append(made.displaced)
        assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(chosen))
        assert (made.displaced, gone) == (FEW, list(range(FEW)))
        group.cancel_scope.cancel()


async def test_a_link_is_undisturbed_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 1e6)
    made, gave_way = HalfLinks(), list[int]()
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for number in range(FEW):
            await stack.enter_async_context(made.room_for("10.0.0.1", partial(gave_way.append, number)))
        group.start_soon(made.room_for("10.0.0.2", lambda: None).__aenter__)
        await turns()
        assert (len(made), made.displaced, gave_way) == (FEW, 0, [])
        group.cancel_scope.cancel()


@pytest.mark.autojump
async def test_no_timer_is_left_when_no_link_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel the timer: it would keep objects of an engine that has ended."""
    monkeypatch.setattr(half_links, "UNDISTURBED_SECONDS", 60.0)
    made, looks, call = HalfLinks(), list[FairQueue](), FairQueue.call

    def count(line: FairQueue) -> None:
        looks.append(line)
        call(line)

    monkeypatch.setattr(FairQueue, "call", count)
    async with AsyncExitStack() as stack:
        for _ in range(FEW):
            await stack.enter_async_context(made.room_for("10.0.0.1", lambda: None))
        with anyio.move_on_after(30):
            await stack.enter_async_context(made.room_for("10.0.0.2", lambda: None))
        looks.clear()
        with took(120):
            await anyio.sleep(120)
        assert not looks


def test_half_made_links_take_a_sixteenth_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_links, "MAX_HALF_LINKS", 128)
    for files, limit in ((1024, 64), (40, 2), (10, 1), (10**6, 128), (resource.RLIM_INFINITY, 128)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=files: (soft, soft))
        assert HalfLinks().limit == limit


def test_data_connections_count_as_files_of_a_half_made_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_links, "MAX_HALF_LINKS", 128)
    for files, streams, limit in (
        (1024, 0, 64),
        (1024, 5, 32),
        (1024, 32, 8),
        (1024, 1, 53),
        (40, 32, 1),
        (10**6, 32, 128),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=files: (soft, soft))
        made = HalfLinks()
        made.allow_for(streams)
        assert made.limit == limit
        assert 2 * made.limit * (5 + streams) <= max(files * 5 / 8, 2 * (5 + streams))
