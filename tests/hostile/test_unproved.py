"""Words of an unproved end. They decide about its own connection only: none ends relinking."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

from aiodatadist import LLMClusterInfo, LLMStatusCode
from aiodatadist._cluster.initiator import LinkInitiator
from aiodatadist._wire.frames import Decoder, Unknown, encode
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL, Hello, Hello1, Message, Refuse, Welcome
from aiodatadist.testing import cluster_info, open_cluster
from tests.keys import proving
from tests.test_relink import GIVEN_UP, LINKED, QUICK, RELINKING, Door, cut, phases, pulled, until, waiting_pair
from tests.unit.wire.examples import endpoint
from tests.unit.wire.examples import hello as example

KEY = b"k" * 32
FEW = 4
"""Attempts at a true cluster's port while another process holds it."""

Answer = Callable[[Hello | Hello1], list[Message]]


def refuse(**changes: Any) -> Answer:
    refusal = {"status": int(LLMStatusCode.LLM_PARAM_INVALID), "reason": "go away", **changes}
    return lambda _: [Refuse(**refusal)]


def hello(**changes: Any) -> Answer:
    """Make a server's hello that differs from the true one in this, without a proof."""

    def answer(theirs: Hello | Hello1) -> list[Message]:
        like = theirs if isinstance(theirs, Hello) else example(1)
        return [like.model_copy(update={"cluster_id": 1, "instance": "e" * 64, "nonce": "f" * 64, **changes})]

    return answer


def welcome(**changes: Any) -> Answer:
    """Make a welcome with a worthless confirmation."""
    values = {"protocol": PROTOCOL, "nonce": "f" * 64, "key_name": "auth_key", "confirmation": "0" * 64, **changes}
    return lambda _: [Welcome(**values)]


ANSWERS: dict[str, Answer] = {
    "refuses: another key": refuse(kind="key", status=int(LLMStatusCode.LLM_LINK_FAILED)),
    "refuses: unfit": refuse(kind="unfit"),
    "refuses: linked already": refuse(status=int(LLMStatusCode.LLM_ALREADY_LINK)),
    "refuses: no reason": refuse(reason="", status=0),
    "another id": hello(cluster_id=9),
    "the client's own id": hello(cluster_id=2),
    "the client's own hello": lambda theirs: [theirs],
    "another version": hello(protocol=9),
    "version 4": hello(protocol=PLAIN_PROTOCOL, has_key=False),
    "version 5": hello(protocol=PROTOCOL, has_key=True),
    "a welcome": welcome(),
    "a welcome of another version": welcome(protocol=6),
    "a welcome with another key": welcome(key_name="another"),
    "a welcome and a hello": lambda theirs: [*welcome()(theirs), *hello()(theirs)],
    "another mode": hello(one_sided=False),
    "another runtime": hello(endpoint=endpoint(runtime="ascend")),
    "another backend": hello(backend="hixl"),
    "no key": hello(has_key=False),
    "a key": hello(has_key=True),
    "the true id": hello(),
    "no word": lambda _: [],
}


class Impostor:
    """A process that holds a cluster's port.

    It answers each hello as told and then closes the connection, or keeps the connection open and says nothing.
    """

    def __init__(self, answer: Answer | None) -> None:
        self._answer = answer
        self.met = asyncio.Event()
        self.heard: list[Message | Unknown] = []

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        decoder, said = Decoder(), list[Message | Unknown]()
        async with client:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while not said:
                    said = decoder.feed(await client.receive())
                self.heard += said
                self.met.set()
                assert isinstance(said[0], (Hello, Hello1))
                if self._answer is None:
                    await anyio.sleep_forever()
                    return
                answers = self._answer(said[0])
                await client.send(b"".join(map(encode, answers)))
                while answers:  # until the client has had enough of it
                    self.heard += decoder.feed(await client.receive())

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[int]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, self.serve)
            yield listener.extra(anyio.abc.SocketAttribute.local_port)
            group.cancel_scope.cancel()


class Attempts:
    """Counts attempts to link again: the first few wait until the port is held, the others until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, few: int) -> None:
        self.port_is_held, self.reached, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        again, numbers = LinkInitiator.link_once, itertools.count()

        async def link_once(initiator: LinkInitiator, *arguments: Any) -> None:
            await self.port_is_held.wait()
            if next(numbers) == few:
                self.reached.set()
                await self.go_on.wait()
            await again(initiator, *arguments)

        monkeypatch.setattr(LinkInitiator, "link_once", link_once)


@pytest.mark.autojump
@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_a_process_that_holds_a_clusters_port_does_not_end_relinking(
    name: str, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link comes back with the first attempt after the true cluster listens."""
    impostor, attempts = Impostor(ANSWERS[name]), Attempts(monkeypatch, FEW)
    async with waiting_pair(relink=QUICK, **proving(key)) as (_, decoder, _, cache, door, changes):
        port = door.port

        async def hold_the_port() -> None:
            async with impostor.at(port):
                attempts.port_is_held.set()
                await attempts.reached.wait()
            await door.open()
            attempts.go_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hold_the_port)
            told = await until(changes, LINKED, GIVEN_UP)
            assert phases(told) == [(LINKED, 2)]
        assert told[-1].attempt == FEW + 1
        delays = [change.next_delay or 0.0 for change in told if change.state is RELINKING]
        assert all(0.0025 * 2**n <= delay <= 0.005 * 2**n for n, delay in enumerate(delays[:3]))
        assert sum(isinstance(each, (Hello, Hello1)) for each in impostor.heard) == FEW
        figures = decoder.datadist.figures()
        assert (figures.relinks_given_up, figures.relinking.statuses["LLM_SUCCESS"]) == (0, 1)
        await pulled(decoder, cache, 3, 4)


async def test_a_process_that_holds_a_clusters_port_and_says_nothing_does_not_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt ends with that process, long before its own time."""

    impostor, attempts = Impostor(None), Attempts(monkeypatch, 1)
    async with waiting_pair(relink=QUICK, auth_key=KEY) as (_, _, _, _, door, changes):
        port = door.port

        async def hold_the_port() -> None:
            async with impostor.at(port):
                attempts.port_is_held.set()
                await impostor.met.wait()
            await door.open()
            attempts.go_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hold_the_port)
            told = await until(changes, LINKED, GIVEN_UP)
        assert phases(told) == [(LINKED, 2)]
        assert told[-1].attempt == 2


@pytest.mark.timeout(30)
@pytest.mark.parametrize("answer", [b"", b"KV"], ids=["no word", "half a word"])
async def test_a_connection_that_an_impostor_keeps_does_not_hold_relinking(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free the port, so that the true cluster listens there again, but keep the taken connection open and silent.

    Before the limit, an attempt had an hour.
    """
    attempts = Attempts(monkeypatch, 1)
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, relink=QUICK) as decoder,
    ):
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 3_600_000)
        assert linked[0] is LLMStatusCode.LLM_SUCCESS
        door, changes = Door(prompt), decoder.datadist.link_changes()
        await door.close()
        with socket.create_server(("127.0.0.1", door.port)) as listener:
            await cut(prompt)
            attempts.port_is_held.set()
            attempts.go_on.set()
            kept, _ = await anyio.to_thread.run_sync(listener.accept)
        with kept:
            await door.open()
            kept.sendall(answer)
            told = await until(changes, LINKED, GIVEN_UP)
        assert phases(told)[-1] == (LINKED, 2)
        assert any("did not prove within 1 s that it is cluster 1" in str(change.reason) for change in told)


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_another_cluster_of_the_group_at_the_port_does_not_end_relinking(
    key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proof may have been relayed by a process that has no key."""
    attempts = Attempts(monkeypatch, FEW)
    async with waiting_pair(relink=QUICK, **proving(key)) as (_, _, _, _, door, changes):
        listen = f"127.0.0.1:{door.port}"

        async def hold_the_port() -> None:
            async with open_cluster(9, device_id=3, listen_ip_info=listen, **proving(key)):
                attempts.port_is_held.set()
                await attempts.reached.wait()
            await door.open()
            attempts.go_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hold_the_port)
            told = await until(changes, LINKED, GIVEN_UP)
            assert phases(told) == [(LINKED, 2)]
        reasons = [str(change.reason) for change in told if change.state is RELINKING]
        assert ["cluster 1 was asked for, 9 answered" in each for each in reasons] == [False] + FEW * [True]


async def test_an_unproved_end_of_a_caller_is_named_so() -> None:
    async with Impostor(refuse(kind="key")).at(0) as port, open_cluster(2, auth_key=KEY) as cluster:
        info = LLMClusterInfo(1)
        info.append_remote_ip_info("127.0.0.1", port)
        linked = await cluster.datadist.link_clusters([info], 5000)
        assert "an unproved peer refused: go away" in str(linked.errors)
