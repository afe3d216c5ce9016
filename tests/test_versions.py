"""Ends of different versions: minor ones talk, and what is of another major version is refused at once, with both values."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AuthError,
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheNotFound,
    DataType,
    FeatureNotEnabled,
    IncompatiblePeer,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
    Placement,
    ProtocolError,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cluster.engine import Engine
from aiodatadist._link import Link
from aiodatadist._link.control import wire
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION, Decoder, Unknown, encode, framed
from aiodatadist._wire.messages import (
    MINOR,
    PLAIN_PROTOCOL,
    PROTOCOL,
    Hello,
    Hello1,
    Message,
    Pong,
    Refuse,
    Welcome,
    parser,
)
from aiodatadist._wire.reasons import refusal
from aiodatadist._wire.seals import Sealer
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, open_cluster, verify
from tests import children
from tests.unit.wire.examples import hello

DESC = CacheDesc(4, [16, 2048], DataType.DT_UINT8)
POOL = {"memory_size": 1 << 20, "page_shift": 12}


def frame(content: dict[str, Any], sealer: Sealer | None = None) -> bytes:
    return framed(json.dumps(content).encode(), sealer)


def with_more(message: Message | dict[str, Any], _: int = MINOR, sealer: Sealer | None = None) -> bytes:
    """Encode a message as an end of the next minor version does: with fields and messages that this one does not know."""
    if isinstance(message, dict):
        return frame(message, sealer)
    if isinstance(message, (Hello, Hello1, Welcome)):
        return encode(message, sealer=sealer)
    content = json.loads(parser.dump_json(message))
    content["newer"] = {"of": ["the", "next", 1]}
    for name in ("cache", "name", "parts"):
        if isinstance(content.get(name), dict):
            content[name]["newer"] = None
    return frame(content, sealer)


def speak_newer(patch: Callable[[object, str, object], None]) -> None:
    """Make each end in this process speak the next minor version from here on."""
    own = Engine.hello

    def made(self: Engine, has_key: bool, peer: int | None) -> Hello:
        plain = json.loads(parser.dump_json(own(self, has_key, peer)))
        plain["endpoint"]["newer"] = "address"
        return Hello.model_validate({**plain, "minor": MINOR + 1, "newer": [1.5, {"a": None}]})

    patch(Engine, "hello", made)
    patch(wire, "encode", with_more)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end takes the other for one of the next minor version, and speaks as one."""
    speak_newer(monkeypatch.setattr)


def link_of(cluster: Cluster, peer: int) -> Link:
    engine = inside(cluster.datadist)
    assert engine is not None
    return engine.links.find(peer)


@pytest.mark.usefixtures("newer")
async def test_all_that_is_said_may_have_more_fields_than_this_version_knows() -> None:
    async with linked_pair(DESC, mem_pool_cfg=POOL, auth_key=b"key") as (prompt, decoder, source, cache):
        manager, owner = decoder.datadist.cache_manager, prompt.datadist.cache_manager
        assert (await manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0], notify=b"x")).bytes == 4 * 2048
        assert (await anext(prompt.datadist.notifications())).payload == b"x"
        assert (await manager.push_blocks(BlocksCacheKey(1), cache, [0], [5])).bytes == 4 * 2048
        synchronizer = AwaitableLayerSynchronizer(2)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(2), range(2))
        async with owner.receive_layers(2, source) as receiver:
            task = manager.transfer_cache_async(cache, synchronizer, [config], [0], [9])
            for layer in range(2):
                synchronizer.ready(layer)
                await receiver.layer(layer)
            await task
        ticket = owner.lease_blocks(source, [4], 10).ticket()
        assert (await manager.pull_leased(ticket, cache, [1])).bytes == 4 * 2048
        pooled = await owner.allocate_blocks_cache(DESC, BlocksCacheKey(1, 7))
        await manager.pull_blocks(BlocksCacheKey(1, 7), cache, [1], [2])
        await owner.deallocate_blocks_cache(pooled)
        late = await decoder.blocks(DESC, model_id=8)
        await manager.pull_blocks(BlocksCacheKey(1), late, [1], [2])  # over a further channel
        assert (await decoder.datadist.unlink_clusters([cluster_info(prompt)]))[0] is LLMStatusCode.LLM_SUCCESS
        with suppress(NotLinked):  # it has ended already
            await prompt.datadist.wait_link_closed(2)
        assert prompt.datadist.figures().links_ended == {"unlinked": 1}


@pytest.mark.usefixtures("newer")
async def test_requests_may_have_more_fields_too() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "mem_pool_cfg": POOL}
    async with linked_pair(DESC, **options) as (prompt, decoder, _, _):
        manager, owner = decoder.datadist.cache_manager, prompt.datadist.cache_manager
        source = await owner.allocate_cache(DESC, [CacheKey(1, 5)])
        target = await manager.allocate_cache(DESC)
        assert (await manager.pull_cache(CacheKey(1, 5), target)).bytes == 4 * 2048
        await owner.deallocate_cache(source)
        await manager.deallocate_cache(target)
        for each in (manager, owner):
            usage = each.pool_usage()[Placement.DEVICE]
            assert usage.free == usage.total
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])


PEER = [sys.executable, "-m", "tests.newer_peer"]


def mode(one_sided: bool) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": one_sided, "auth_key": b"key", "sync_kv_timeout": 20_000}


async def use(cluster: Cluster, peer: LLMClusterInfo, cache: Cache, one_sided: bool) -> None:
    """Link to a peer, pull from it, push to it, and part from it in good order."""
    me, other = cluster.datadist, int(peer.remote_cluster_id or 0)
    linked = await me.link_clusters([peer], 10_000)
    assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
    await me.check_link_status(other)
    for _ in range(3):
        await me.cache_manager.pull_blocks(BlocksCacheKey(other), cache, [3, 4], [0, 1])
    if one_sided:
        await me.cache_manager.push_blocks(BlocksCacheKey(other), cache, [7], [9])
    with pytest.raises(CacheNotFound):
        await me.cache_manager.pull_blocks(BlocksCacheKey(other, 5), cache, [3], [0])
    verify(cluster.memory(cache), cache, [(t, b, other, b + 3) for t in range(4) for b in range(2)])
    assert (await me.unlink_clusters([peer], 10_000))[0] is LLMStatusCode.LLM_SUCCESS


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request/response"])
async def test_this_version_links_to_the_next_one(one_sided: bool) -> None:
    peer = await children.create_subprocess_exec(
        *PEER, str(int(one_sided)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        info = LLMClusterInfo(1)
        info.append_remote_ip_info("127.0.0.1", int(await peer.stdout.readline()))
        async with open_cluster(2, device_id=1, **mode(one_sided)) as cluster:
            await use(cluster, info, await cluster.blocks(DESC), one_sided)
        peer.stdin.close()
        assert await peer.wait() == 0
    finally:
        if peer.returncode is None:
            peer.kill()
            await peer.wait()


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request/response"])
async def test_the_next_version_links_to_this_one(one_sided: bool) -> None:
    async with open_cluster(2, device_id=1, **mode(one_sided)) as cluster:
        await cluster.blocks(DESC)
        address = cluster.datadist.listen_address
        assert address is not None
        peer = await children.create_subprocess_exec(
            *PEER, str(int(one_sided)), str(address[1]), stderr=subprocess.PIPE
        )
        _, errors = await peer.communicate()
        assert peer.returncode == 0, errors.decode()
        with suppress(NotLinked):  # it has ended already
            await cluster.datadist.wait_link_closed(1)
        assert cluster.datadist.figures().links_ended == {"unlinked": 1}


async def test_a_peer_of_the_same_version_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._link.control.wire.encode", with_more)
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as other:
        linked = await other.datadist.link_clusters([cluster_info(one)], 3000)
        assert linked[0] is not LLMStatusCode.LLM_SUCCESS
        assert "newer: Extra inputs are not permitted" in str(linked.errors)
        assert f"protocol {PROTOCOL}.{MINOR} here, {PROTOCOL}.{MINOR} at the peer" in str(linked.errors)


@pytest.mark.usefixtures("newer")
async def test_a_message_that_this_version_does_not_know_is_ignored_if_it_may_be_and_else_refused_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        link = link_of(decoder, 1)
        link.session.post({"type": "gossip", "optional": True, "of": "the weather"})  # type: ignore[arg-type]
        await link.session.ping(10)
        assert "gossip" not in caplog.text
        with pytest.raises(FeatureNotEnabled, match="the peer's version does not know what 'pong' answers"):
            await link.session.questions.ask(lambda call: {"type": "inquire", "call": call}, Pong)  # type: ignore[arg-type, return-value]
        link.session.post({"type": "inform"})  # type: ignore[arg-type]
        await link.session.ping(10)
        assert "cluster 1 does not know 'inform': it is of an older version" in caplog.text
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert link_of(prompt, 2).session.is_ready


async def test_a_message_that_a_peer_of_the_same_version_should_not_know_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        monkeypatch.setattr("aiodatadist._link.control.wire.encode", with_more)
        link_of(decoder, 1).session.post({"type": "gossip", "optional": True})  # type: ignore[arg-type]
        assert "is not valid" in str(await prompt.datadist.wait_link_closed(2))


OTHER = {"protocol": PLAIN_PROTOCOL + 5, "minor": 3}


@pytest.mark.parametrize(
    "hello_of_theirs",
    [
        pytest.param({**hello(9).model_dump(), **OTHER}, id="with all fields"),
        pytest.param({"type": "hello", **OTHER, "who": {"id": 9}}, id="with others"),
    ],
)
async def test_another_major_version_is_refused_in_one_round_trip_with_both_values(
    hello_of_theirs: dict[str, Any],
) -> None:
    words = f"protocol differs: {PLAIN_PROTOCOL}.{MINOR} here, {PLAIN_PROTOCOL + 5}.3 at the peer"
    async with open_cluster(1, trust="none") as cluster:
        assert cluster.datadist.listen_address is not None
        async with await anyio.connect_tcp(*cluster.datadist.listen_address) as stream:
            await stream.send(frame(hello_of_theirs))
            said = b""
            with anyio.fail_after(30):
                async for data in stream:
                    said += data
        refusals = [each for each in Decoder().feed(said) if isinstance(each, Refuse)]  # it may be said twice
        assert {(each.status, each.reason) for each in refusals} == {(LLMStatusCode.LLM_PARAM_INVALID, words)}


async def test_a_server_of_another_major_version_is_refused_with_both_values() -> None:
    heard: list[Message | Unknown] = []

    async def serve(client: anyio.abc.SocketStream) -> None:
        decoder = Decoder()
        async with client:
            while not heard:
                heard.extend(decoder.feed(await client.receive()))
            await client.send(frame({"type": "hello", **OTHER}))
            while len(heard) < 2:
                heard.extend(decoder.feed(await client.receive()))

    async with (
        open_cluster(2, trust="none") as cluster,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        info = LLMClusterInfo(9)
        info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        linked = await cluster.datadist.link_clusters([info], 5000)
        words = f"protocol differs: {PLAIN_PROTOCOL}.{MINOR} here, {PLAIN_PROTOCOL + 5}.3 at the peer"
        assert linked[0] is LLMStatusCode.LLM_PARAM_INVALID
        assert words in str(linked.errors)
        assert isinstance(heard[1], Refuse)
        assert words in heard[1].reason
        group.cancel_scope.cancel()


UNREADABLE = {**json.loads(parser.dump_json(hello(9))), "role": 4, "newer": {"a": 1}}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ({"minor": MINOR + 1}, f"{PLAIN_PROTOCOL}.{MINOR + 1}"),
        ({"minor": MINOR}, f"{PLAIN_PROTOCOL}.{MINOR}"),
        ({"protocol": PLAIN_PROTOCOL + 5, "minor": 0}, f"{PLAIN_PROTOCOL + 5}.0"),
        ({"minor": "latest"}, f"{PLAIN_PROTOCOL}"),
        ({"protocol": "x" * 5000}, "none"),
    ],
)
async def test_a_hello_that_cannot_be_read_is_refused_with_both_versions(version: dict[str, Any], said: str) -> None:
    async with open_cluster(1, trust="none") as cluster:
        assert cluster.datadist.listen_address is not None
        async with await anyio.connect_tcp(*cluster.datadist.listen_address) as stream:
            await stream.send(frame({**UNREADABLE, **version}))
            answer = b"".join([data async for data in stream])
        reasons = {each.reason for each in Decoder().feed(answer) if isinstance(each, Refuse)}
        assert len(reasons) == 1
        assert f"{PLAIN_PROTOCOL}.{MINOR} here, {said} at the peer" in reasons.pop()


class Answering:
    """A listener that answers each hello with one frame, and counts them."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heard: list[Message | Unknown] = []

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        decoder, said = Decoder(), list[Message | Unknown]()
        async with client:
            while not said:
                said = decoder.feed(await client.receive())
            self.heard += said
            await client.send(self.answer)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    self.heard += decoder.feed(await client.receive())

    async def link(self) -> str:
        """Return the error of a cluster that links to it."""
        async with (
            open_cluster(2, trust="none") as cluster,
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, self.serve)
            info = LLMClusterInfo(9)
            info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
            linked = await cluster.datadist.link_clusters([info], 5000)
            group.cancel_scope.cancel()
        assert linked[0] is LLMStatusCode.LLM_PARAM_INVALID
        return str(linked.errors)


async def test_an_end_whose_hello_an_older_version_cannot_read_is_told_its_own_version() -> None:
    """Version 4 without minor versions has no more fields in a hello, and says so in its validator's words."""
    words = "the peer sent a message that is not valid: hello.minor: Extra inputs are not permitted"
    old = {"type": "refuse", "status": int(LLMStatusCode.LLM_PARAM_INVALID), "reason": words}
    body = json.dumps(old).encode()
    told = await Answering(HEAD.pack(MAGIC, VERSION, len(body)) + body).link()
    assert f"protocol {PLAIN_PROTOCOL}.{MINOR} here, the peer did not say its own" in told
    assert words in told


async def test_a_refusal_that_names_both_versions_is_told_as_it_is() -> None:
    words = f"protocol differs: {PLAIN_PROTOCOL + 5}.0 here, {PLAIN_PROTOCOL}.{MINOR} at the peer"
    told = await Answering(encode(refusal(IncompatiblePeer(words)))).link()
    assert words in told
    assert "did not say its own" not in told


async def test_a_servers_hello_that_cannot_be_read_is_refused_with_both_versions() -> None:
    server = Answering(frame({**UNREADABLE, "minor": MINOR + 2}))
    told = await server.link()
    words = f"protocol {PLAIN_PROTOCOL}.{MINOR} here, {PLAIN_PROTOCOL}.{MINOR + 2} at the peer"
    assert words in told
    (said,) = {each.reason for each in server.heard if isinstance(each, Refuse)}
    assert words in said


async def test_only_a_peer_of_a_newer_minor_version_may_say_what_this_one_does_not_know() -> None:
    novel = frame({"type": "novel", "call": 3})
    for minor in (None, MINOR - 1, MINOR, MINOR + 1):
        decoder = Decoder()
        if minor is not None:
            decoder.meet(hello(1, minor=minor))
        if minor == MINOR + 1:
            assert decoder.feed(novel) == [Unknown("novel", 3)]
        else:
            with pytest.raises(ProtocolError, match="novel"):
                decoder.feed(novel)


@pytest.mark.parametrize("has_key", [True, False], ids=["the server has one", "the client has one"])
async def test_an_end_with_a_key_and_one_without_are_told_both_versions(
    has_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither speaks the other's version: an end with a key is not brought down to version 4."""
    plain: dict[str, Any] = {"trust": "none"}
    server, client = ({}, plain) if has_key else (plain, {})
    async with open_cluster(1, **server) as one, open_cluster(2, device_id=1, **client) as other:
        linked = await other.datadist.link_clusters([cluster_info(one)], 5000)
    here, there = (PROTOCOL, PLAIN_PROTOCOL) if has_key else (PLAIN_PROTOCOL, PROTOCOL)
    words = f"protocol differs: {here} here, {there} at the peer"
    assert isinstance(linked.errors[0], AuthError)
    assert f"an unproved peer refused: {words}" in str(linked.errors[0])
    assert "a client was not linked: 127.0.0.1:" in caplog.text
    assert words in caplog.text
