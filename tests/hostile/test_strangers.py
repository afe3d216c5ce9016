"""Strangers at a cluster's port: they cost their own connections, and have no part in what links decide."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import anyio
import anyio.abc
import pytest

from aiodatadist import CacheDesc, DataType, LLMRole, LLMStatusCode
from aiodatadist._cluster import client_slots, link_table
from aiodatadist._cluster.client_slots import Bucket, ClientSlots
from aiodatadist._cluster.pending_client import CLIENT_TIMEOUT
from aiodatadist._config.trust import Key
from aiodatadist._testing.views import clients_of
from aiodatadist._wire.frames import Decoder, Unknown, encode
from aiodatadist._wire.key_proof import KeyProof, SessionKeys
from aiodatadist._wire.messages import MINOR, PROTOCOL, Hello, Hello1, Message, Refuse, Welcome
from aiodatadist._wire.seals import Opener, Sealer
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster
from tests.clock import AutojumpLoop
from tests.held import turns
from tests.keys import proving
from tests.unit.wire.examples import hello

KEY = b"k" * 32
DESC = CacheDesc(1, [4, 64], DataType.DT_UINT8)
MANY = 80
"""Connections that say nothing."""


def stranger() -> Hello1:
    return Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["auth_key"])


class AnySeal(Opener):
    """Accepts each sealed message."""

    def counter_of(self, data: bytes) -> int:
        return self.due


class Client:
    """A connection to a cluster's port, or from a cluster."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._decoder = Decoder()
        self._sealer: Sealer | None = None
        self._heard: list[Message | Unknown] = []

    async def say(self, *messages: Message) -> None:
        await self._stream.send(b"".join(encode(message, sealer=self._sealer) for message in messages))

    async def hear(self) -> Message | Unknown:
        """Return the next message. Raises EndOfStream, BrokenResourceError."""
        while not self._heard:
            self._heard = self._decoder.feed(await self._stream.receive())
        return self._heard.pop(0)

    async def prove(self, key: bytes) -> SessionKeys:
        """Prove a key to a server, seal everything from then on, and return the keys of the connection."""
        proof = KeyProof("client", (Key("auth_key", key),))
        await self.say(proof.start())
        proof.receive(await self.hear())
        return self._seal(proof)

    @property
    def is_sealed(self) -> bool:
        return self._decoder.opener is not None

    async def welcome(self, key: bytes, behind: bytes = b"", first: Message | Unknown | None = None) -> None:
        """Answer a client's first message with this key, and seal everything from then on.

        Args:
            behind: sent behind the answer, together with it.
            first: the client's first message, if it was heard already.
        """
        proof = KeyProof("server", (Key("auth_key", key),))
        answer = proof.receive(first or await self.hear())
        assert answer is not None
        await self._stream.send(encode(answer) + behind)
        self._seal(proof)

    async def leave(self) -> None:
        await self._stream.aclose()

    def accept_any_seal(self) -> None:
        """Read what is sealed without the key for it."""
        self._decoder.open_with(AnySeal(b""))

    def _seal(self, proof: KeyProof) -> SessionKeys:
        assert proof.keys is not None
        self._sealer, opener = proof.keys.frames(proof.side)
        self._decoder.open_with(opener)
        return proof.keys


def port_of(cluster: Cluster) -> int:
    address = cluster.datadist.listen_address
    assert address is not None
    return address[1]


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[Client]:
    async with await anyio.connect_tcp("127.0.0.1", port_of(cluster)) as stream:
        yield Client(stream)


@contextmanager
def silent(cluster: Cluster, count: int, host: str = "127.0.0.2") -> Iterator[list[socket.socket]]:
    """Open silent connections from an address."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(socket.create_connection(("127.0.0.1", port_of(cluster)), source_address=(host, 0)))
            )
            for _ in range(count)
        ]


async def link(decoder: Cluster, prompt: Cluster) -> None:
    linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 60_000)
    assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors


async def test_hellos_without_a_proof_take_no_room_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_table, "MAX_LINKS", 1)
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as decoder,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            client = await stack.enter_async_context(client_of(prompt))
            await client.say(stranger())
            assert isinstance(await client.hear(), Welcome)
        await link(decoder, prompt)


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_a_hello_alone_keeps_no_call_from_its_work(key: bytes | None) -> None:
    """A cluster's role can be switched, and its caches unregistered, when it has no link."""
    async with open_cluster(1, **proving(key)) as cluster, client_of(cluster) as client:
        cache = await cluster.blocks(DESC)
        await client.say(stranger() if key is not None else hello(5, minor=MINOR))
        assert isinstance(await client.hear(), Welcome if key is not None else Hello)
        assert not inside(cluster.datadist).links.opening
        await cluster.datadist.cache_manager.unregister_cache(cache.cache_id)
        await cluster.datadist.switch_role(LLMRole.PROMPT)


@pytest.mark.autojump
async def test_silent_connections_do_not_shorten_the_time_of_others() -> None:
    async with open_cluster(1, auth_key=KEY) as cluster:
        with silent(cluster, MANY):
            async with client_of(cluster) as client:
                await client.prove(KEY)
                await anyio.sleep(4)  # its network is slow
                await client.say(hello(5, has_key=True))
                assert isinstance(await client.hear(), Hello)


@pytest.mark.autojump
async def test_time_in_which_the_listener_is_busy_does_not_count() -> None:
    """The proof is there in time, and is read late."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AutojumpLoop)
    async with open_cluster(1, auth_key=KEY) as cluster:
        with silent(cluster, 1) as (client,):
            client.setblocking(False)
            proof, decoder = KeyProof("client", (Key("auth_key", KEY),)), Decoder()
            client.send(encode(proof.start()))
            (said,) = decoder.feed(await loop.sock_recv(client, 4096))
            proof.receive(said)
            assert proof.keys is not None
            sealer, opener = proof.keys.frames("client")
            decoder.open_with(opener)
            client.send(encode(hello(5, has_key=True), sealer=sealer))
            loop.jumped += 2 * CLIENT_TIMEOUT
            await turns()
            heard = decoder.feed(await loop.sock_recv(client, 4096))
            assert [type(each) for each in heard] == [Hello]


async def test_silent_connections_make_room_for_a_cluster_that_links() -> None:
    """The oldest of the address that has most of them, and it is told why."""
    async with (
        open_cluster(1, auth_key=KEY, quotas={"unproved": 4}) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as decoder,
    ):
        slots = clients_of(inside(prompt.datadist))
        async with client_of(prompt) as few:
            await few.say(stranger())
            assert isinstance(await few.hear(), Welcome)
            with silent(prompt, 3) as many:
                while len(slots) < 4:
                    await anyio.lowlevel.checkpoint()
                await link(decoder, prompt)
                assert slots.displaced >= 1
                with contextlib.closing(many[0]) as oldest:
                    oldest.settimeout(10)
                    (refusal,) = Decoder().feed(oldest.recv(4096))
                    assert isinstance(refusal, Refuse)
                    assert refusal.reason == "this end gave up before the proof"
            await few.say(hello(5, has_key=True))  # without a seal
            few.accept_any_seal()
            assert isinstance(refused := await few.hear(), Refuse)
            assert "no seal" in refused.reason


def test_the_address_with_most_connections_makes_room() -> None:
    slots, gone = ClientSlots(of_all=4), list[str]()

    def enter(host: str) -> None:
        slots.enter(host, lambda: gone.append(host))

    for host in ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"):
        enter(host)
    assert gone == ["10.0.0.2", "10.0.0.1"]
    assert len(slots) == 4


def test_strangers_take_a_quarter_of_the_files_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 1000))
    slots = ClientSlots()
    for i in range(30):
        slots.enter(f"10.0.0.{i}", lambda: None)
    assert (len(slots), slots.displaced) == (10, 20)
    for files in (10**6, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=files: (soft, soft))
        assert ClientSlots()._limit == client_slots.MAX_CLIENTS


# ---- the budget of an address ----


class Clock:
    """A clock that stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_what_it_has_and_then_at_its_rate() -> None:
    bucket = Bucket(20, 64, 0)
    assert [bucket.take(0) for _ in range(64)] == [0] * 64
    assert [bucket.take(0) for _ in range(3)] == [0.05, 0.1, 0.15]
    assert bucket.take(1) == 0, "20 have come, of which 3 were owed"
    bucket.give()
    assert [bucket.take(1) for _ in range(17)] == [0] * 17
    assert bucket.take(1) == 0.05
    assert [bucket.take(3600) for _ in range(64)] == [0] * 64
    assert bucket.take(3600) == 0.05, "no more than a burst gathers"


def test_each_address_has_a_rate_of_its_own() -> None:
    clock, waits = Clock(), Counter[str]()
    slots = ClientSlots(64, 1024, 20, True, clock, None, waits)
    numbers = [slots.enter("10.0.0.1", lambda: None) for _ in range(64)]
    assert [slots.wait(number) for number in numbers] == [0] * 64
    late = slots.enter("10.0.0.1", lambda: None)
    assert slots.wait(late) == pytest.approx(0.05)
    assert waits == {"unproved_per_second": 1}
    assert slots.wait(slots.enter("10.0.0.2", lambda: None)) == 0
    clock.now += 0.05
    assert slots.wait(late) == 0


def test_who_proves_itself_and_who_was_never_read_does_not_count_to_the_rate() -> None:
    slots = ClientSlots(2, 1024, 1, True, Clock())
    for _ in range(100):
        number = slots.enter("10.0.0.1", lambda: None)
        assert slots.wait(number) == 0
        slots.proved(number)
        slots.leave(number)
    for _ in range(2):
        slots.leave(slots.enter("10.0.0.1", lambda: None))
    for _ in range(100):
        number = slots.enter("10.0.0.1", lambda: None)
        assert slots.wait(number) == 1
        slots.leave(number)


def test_addresses_of_this_machine_share_the_limit_of_all() -> None:
    slots = ClientSlots(2, 10, 1, True, Clock())
    for host in ["127.0.0.1"] * 8 + ["::1", "::ffff:127.0.0.1"]:
        assert slots.wait(slots.enter(host, lambda: None)) == 0
    assert (len(slots), slots.displaced) == (10, 0)


def test_rates_of_few_addresses_are_remembered() -> None:
    slots = ClientSlots(64, 1024, 20, True, Clock())
    for number in range(2 * client_slots.MAX_RATES):
        slots.leave(slots.enter(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", lambda: None))
    assert slots.rated == client_slots.MAX_RATES


@pytest.fixture
def as_if_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat loopback addresses like those of other machines."""
    monkeypatch.setattr(client_slots, "is_of_this_machine", lambda host: False)


@pytest.mark.usefixtures("as_if_remote")
async def test_an_address_displaces_its_own_connections_only() -> None:
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY) as decoder,
    ):
        slots = clients_of(inside(prompt.datadist))
        with silent(prompt, 1, "127.0.0.3") as (other,), silent(prompt, MANY) as many:
            while slots.displaced < MANY - 64:
                await anyio.lowlevel.checkpoint()
            await link(decoder, prompt)
            assert prompt.datadist.figures().budget_refusals == {"unproved_of_one": MANY - 64}
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)
            many[MANY - 65].settimeout(10)
            assert many[MANY - 65].recv(4096), "it was told that it had to leave"


@pytest.mark.autojump
@pytest.mark.usefixtures("as_if_remote")
async def test_a_client_beyond_the_rate_of_its_address_is_read_when_its_turn_comes() -> None:
    quotas = {"unproved_of_one": 4, "unproved_per_second": 1}
    loop = asyncio.get_running_loop()
    async with open_cluster(1, auth_key=KEY, quotas=quotas) as cluster:
        slots = clients_of(inside(cluster.datadist))
        with silent(cluster, 4, "127.0.0.1"):
            while len(slots) < 4:
                await anyio.lowlevel.checkpoint()
            began = loop.time()
            async with client_of(cluster) as client:
                await client.say(stranger())
                assert isinstance(await client.hear(), Welcome)
                assert loop.time() - began == pytest.approx(1)
        assert cluster.datadist.figures().budget_waits == {"unproved_per_second": 1}


@pytest.mark.autojump
async def test_a_client_has_five_seconds_to_prove_itself_and_five_more_to_ask_for_a_link() -> None:
    loop = asyncio.get_running_loop()
    async with open_cluster(1, auth_key=KEY) as cluster, client_of(cluster) as client:
        await client.prove(KEY)
        await anyio.sleep(4)
        began = loop.time()
        await client.say(hello(5, has_key=True))
        assert isinstance(await client.hear(), Hello)
        assert isinstance(await client.hear(), Refuse)
        assert loop.time() - began == pytest.approx(5)


async def test_a_listener_accepts_at_most_64_clients_in_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, accepted, most = asyncio.get_running_loop(), 0, 0
    accept = loop.sock_accept

    async def counted(sock: socket.socket) -> tuple[socket.socket, Any]:
        nonlocal accepted, most
        found = await accept(sock)
        if not accepted:
            loop.call_soon(went_round)
        accepted += 1
        most = max(most, accepted)
        return found

    def went_round() -> None:
        nonlocal accepted
        accepted = 0

    monkeypatch.setattr(loop, "sock_accept", counted)
    async with open_cluster(1, auth_key=KEY) as cluster:
        slots = clients_of(inside(cluster.datadist))
        with silent(cluster, 200):
            while len(slots) < 200:
                await anyio.lowlevel.checkpoint()
    assert 1 <= most <= 64


async def test_no_connection_has_a_thread_before_its_proof() -> None:
    async with open_cluster(1, auth_key=KEY) as cluster:
        slots, before = clients_of(inside(cluster.datadist)), set(threading.enumerate())
        with silent(cluster, MANY):
            while len(slots) < MANY:
                await anyio.lowlevel.checkpoint()
            async with client_of(cluster) as client:
                await client.say(stranger())
                assert isinstance(await client.hear(), Welcome)
                assert not set(threading.enumerate()) - before, "one of an earlier test may end meanwhile"
