"""A process on the path of a link adds, changes, repeats, drops and delays messages and heartbeats (T8, T9).

What it adds or changes ends the link, and is not acted on. What it repeats has no effect. What it drops or delays is said
again, as on any bad network.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode, ProtocolError, TransferTimeout
from aiodatadist._link import Link
from aiodatadist._wire.frames import HEAD, MAGIC, SEALED_VERSION, encode
from aiodatadist._wire.messages import Hello1, Message
from aiodatadist.testing import Cluster, inside, open_cluster, verify
from tests.hostile.on_the_path import BEAT, Path, Way, on_the_path
from tests.hostile.test_strangers import KEY
from tests.unit.wire.examples import EACH

DESC = CacheDesc(2, [8, 512], DataType.DT_UINT8)
WAYS: tuple[Way, ...] = ("to_server", "to_client")
REQUESTS: dict[str, Any] = {"enable_remote_cache_accessible": False}
each_message = pytest.mark.parametrize(
    ("message", "way"),
    [
        pytest.param(
            message, way, id=f"{message.type}-{way}", marks=[] if number // 2 % 2 == at else pytest.mark.nightly
        )
        for number, message in enumerate(EACH)
        for at, way in enumerate(WAYS)
    ],
)
"""Each kind of message one way in every run, and the other way at night: the reader is the same, and does not know kinds."""


class Ends(NamedTuple):
    server: Cluster
    client: Cluster
    path: Path
    source: Cache
    target: Cache

    def link(self, way: Way) -> Link:
        """Return the half of the link that hears what goes this way."""
        cluster, peer = (self.server, 2) if way == "to_server" else (self.client, 1)
        return inside(cluster.datadist).links.find(peer)

    def incidents(self, way: Way) -> dict[str, int]:
        return dict((self.server if way == "to_server" else self.client).datadist.figures().incidents)

    async def pulled(self, block: int) -> None:
        await self.client.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), self.target, [block], [0])
        verify(self.client.memory(self.target), self.target, [(tensor, 0, 1, block) for tensor in range(2)])


@asynccontextmanager
async def ends(**options: Any) -> AsyncIterator[Ends]:
    """Link two clusters over the path. The server is cluster 1, the client cluster 2."""
    config = {"auth_key": KEY, "sync_kv_timeout": 20_000, **options}
    async with (
        open_cluster(1, **config) as server,
        open_cluster(2, device_id=1, **config) as client,
        on_the_path(server) as path,
    ):
        source, target = await server.blocks(DESC), await client.blocks(DESC)
        linked = await client.datadist.link_clusters([path.info(1)], 10_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        yield Ends(server, client, path, source, target)


async def ended_by_protocol(link: Link, words: str) -> None:
    with anyio.fail_after(20):
        failure = await link.wait_closed()
    assert isinstance(failure, ProtocolError), failure
    assert words in str(failure)


def forged(message: Message) -> bytes:
    """Return a sealed frame as a process without the key makes it."""
    content = encode(message)[HEAD.size :].rstrip() + secrets.token_bytes(24)
    return HEAD.pack(MAGIC, SEALED_VERSION, len(content)) + content


@each_message
async def test_an_added_message_ends_the_link_and_is_not_acted_on(
    message: Message, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Try each message without a seal one way, and with a wrong seal the other way: both ends have the same reader."""
    kinds = ((encode(message), "has no seal"), (forged(message), "has a wrong seal"))
    frame, words = kinds[(EACH.index(message) + WAYS.index(way)) % 2]
    async with ends() as both:
        link = both.link(way)
        with monkeypatch.context() as context:
            context.setattr("aiodatadist._wire.frames.read_foreign", None)  # nothing of it is parsed
            both.path.inject(way, frame)
            await ended_by_protocol(link, words)


@each_message
async def test_a_changed_message_ends_the_link_and_is_not_acted_on(message: Message, way: Way) -> None:
    async with ends() as both:
        other: Way = "to_client" if way == "to_server" else "to_server"

        def change(at: Way, kind: str, piece: bytes) -> list[bytes]:
            if (at, kind) != (way, message.type):
                return [piece]
            place = HEAD.size + len(piece[HEAD.size :]) // 2
            return [piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]]

        both.path.decide = change
        link = both.link(way)
        both.link(other).session.post(message)
        await ended_by_protocol(link, "has a wrong seal")
        assert message.type in both.path.kinds


@pytest.mark.parametrize("way", WAYS)
async def test_a_message_of_the_other_way_or_of_another_link_is_an_added_one(way: Way) -> None:
    other: Way = "to_client" if way == "to_server" else "to_server"
    async with ends() as before:
        await before.pulled(1)
        frames = [before.path.frames[way][-1]]
    async with ends() as both:
        await both.pulled(2)
        frames.append(both.path.frames[other][-1])
    for frame in frames:
        async with ends() as both:
            link = both.link(way)
            both.path.inject(way, frame)
            await ended_by_protocol(link, "has a wrong seal")


@pytest.mark.parametrize("options", [{}, REQUESTS], ids=["one-sided", "requests"])
async def test_everything_that_is_said_twice_has_one_effect(options: dict[str, Any]) -> None:
    async with ends(**options) as both:
        both.path.decide = lambda _, kind, piece: [piece] if kind == "beat" else [piece, piece]
        for block in range(1, 5):
            await both.pulled(block)
        for number in range(5):
            await both.client.datadist.notify(1, b"%d" % number)
        notes = both.server.datadist.notifications()
        assert [(await anext(notes)).payload for _ in range(5)] == [b"%d" % number for number in range(5)]
        await both.server.datadist.check_link_status(2)
        await both.client.datadist.check_link_status(1)
        for way in WAYS:
            assert both.incidents(way)["frame_repeated"] >= 2
            assert both.link(way).session.is_ready
        assert (
            await both.client.datadist.unlink_clusters([both.path.info(1)], 10_000)
        ).status is LLMStatusCode.LLM_SUCCESS


async def test_a_message_that_is_said_again_much_later_has_no_effect() -> None:
    """Repeat a disconnect of one end to the other. It was sealed for a counter that was used."""
    async with ends(**REQUESTS) as both:
        await both.pulled(1)
        early = both.path.sealed("to_server")
        for block in (2, 3, 4):
            await both.pulled(block)
        for frame in early:
            both.path.inject("to_server", frame)
        await both.pulled(5)
        assert both.incidents("to_server")["frame_repeated"] >= len(early) > 2
        assert both.link("to_server").session.is_ready


LOST: list[tuple[Way, str, bool]] = [
    ("to_server", "lookup", True), ("to_client", "found", True), ("to_server", "grant", False),
    ("to_server", "pull", False), ("to_client", "pulled", False), ("to_server", "note", True),
    ("to_client", "taken", True), ("to_server", "ping", True), ("to_client", "pong", True),
]  # fmt: skip
"""The ways and kinds of messages, and whether they are said with one-sided transfers."""


async def use(both: Ends) -> None:
    """Make each end say what is in ``LOST``. A request that is lost ends with its time, as on any bad network."""
    while True:
        try:
            await both.pulled(3)
        except TransferTimeout:
            continue
        break
    await both.client.datadist.notify(1, b"a note")
    assert (await anext(both.server.datadist.notifications())).payload == b"a note"
    await both.client.datadist.check_link_status(1)


@pytest.mark.parametrize("what", LOST, ids=lambda what: what[1])
async def test_a_message_that_is_dropped_is_said_again(what: tuple[Way, str, bool]) -> None:
    async with ends(enable_remote_cache_accessible=what[2], sync_kv_timeout=3000) as both:
        left = [what[:2]]

        def drop(way: Way, kind: str, piece: bytes) -> list[bytes]:
            if (way, kind) in left:
                left.remove((way, kind))
                return []
            return [piece]

        both.path.decide = drop
        with anyio.fail_after(25):
            await use(both)
        assert left == []


@pytest.mark.parametrize("what", LOST, ids=lambda what: what[1])
async def test_a_message_that_is_late_is_heard_all_the_same(what: tuple[Way, str, bool]) -> None:
    """Pass it on behind the next one of its way."""
    async with ends(enable_remote_cache_accessible=what[2], sync_kv_timeout=3000) as both:
        left, held = [what[:2]], list[bytes]()

        def hold(way: Way, kind: str, piece: bytes) -> list[bytes]:
            if (way, kind) in left:
                left.remove((way, kind))
                held.append(piece)
                return []
            if way == what[0] and kind != "beat" and held:
                return [piece, held.pop()]
            return [piece]

        both.path.decide = hold
        with anyio.fail_after(25):
            await use(both)
            await both.client.datadist.check_link_status(1)
            await both.server.datadist.check_link_status(2)
        assert (left, held) == ([], [])
        for way in WAYS:
            assert both.link(way).session.is_ready


# ---- heartbeats ----


async def test_nothing_that_goes_by_is_enough_to_bring_heartbeats() -> None:
    async with ends() as both:
        seen = bytes(both.path.seen["to_server"] + both.path.seen["to_client"])
        proved = both.link("to_client").proved
        assert proved is not None
        assert proved.heartbeats.name.encode() in seen
        for secret in (proved.heartbeats.secret, KEY):
            for part in (secret, secret[:32], secret[-32:]):
                assert part not in seen
                assert part.hex().encode() not in seen
        assert b"heartbeat_token" not in seen.replace(b'"heartbeat_token":""', b"")


async def test_heartbeats_of_others_are_refused() -> None:
    """Name a link as its own second connection did, while it is being made and afterwards."""
    async with ends() as both:
        names = [frame for frame in both.path.frames["to_server"] if b'"opens":"heartbeats"' in frame]
        assert len(names) == 1
        address = both.server.datadist.listen_address
        assert address is not None
        for said in (names[0], encode(Hello1(protocols=[5], nonce="a" * 64, key_names=["b" * 64], opens="heartbeats"))):
            async with await anyio.connect_tcp(*address) as stream:
                await stream.send(said + bytes(BEAT))
                told = b"".join([data async for data in stream])
            assert b"heartbeats came for a link that does not exist" in told or b"gave up before the proof" in told
        await both.pulled(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["a beat", "a changed beat", "a beat of the other way"])
async def test_a_forged_heartbeat_ends_the_link(way: Way, what: str) -> None:
    async with ends() as both:
        other: Way = "to_client" if way == "to_server" else "to_server"
        await both.path.wait_beats(*WAYS)
        beats = {
            "a beat": secrets.token_bytes(BEAT),
            "a changed beat": both.path.beats[way][0][:7] + b"\x09" + both.path.beats[way][0][8:],
            "a beat of the other way": both.path.beats[other][0],
        }
        link = both.link(way)
        both.path.inject(way, beats[what], beats=True)
        await ended_by_protocol(link, "a heartbeat has a wrong seal")


@pytest.mark.parametrize("way", WAYS)
async def test_repeated_heartbeats_do_not_keep_a_link_alive(way: Way) -> None:
    """Pass on no more beats of an end, but one of its first again and again."""
    async with ends(heartbeat_interval=0.25, heartbeat_misses=3) as both:
        await both.path.wait_beats(way)
        first, link = both.path.beats[way][0], both.link(way)
        both.path.decide = lambda at, kind, piece: [first] if (at, kind) == (way, "beat") else [piece]
        with anyio.fail_after(20):
            failure = await link.wait_closed()
        assert "no heartbeat for" in str(failure)
