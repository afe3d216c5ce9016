"""Links over TLS: both ends prove certificates, and an end that cannot is refused with the reason, at both ends."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import ssl
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AuthError,
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    IncompatiblePeer,
    LinkError,
    LLMConfig,
    ParamInvalid,
    RegisterMemStatus,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cluster.pending_client import CLIENT_TIMEOUT
from aiodatadist._concurrency.signal import Signal
from aiodatadist._config.certificates import Certificates, read_certificates
from aiodatadist._wire.frames import Decoder, encode
from aiodatadist._wire.messages import Refuse
from aiodatadist._wire.tls_pipe import TlsPipe
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, open_cluster, verify
from tests import children
from tests.blocking import pairs
from tests.certificates import DAY, Authority, folder_for, tls_folder, uri_of
from tests.keys import HEX, folder_of, policy_in
from tests.test_pull import moved
from tests.test_relink import GIVEN_UP, LINKED, phases, pulled, until, waiting_pair
from tests.test_symmetric_links import link_all, settled

DESC = CacheDesc(4, [8, 64], DataType.DT_UINT8)
CA, OTHER = Authority(0), Authority(1)


async def link(client: Cluster, server: Cluster) -> Exception | None:
    linked = await client.datadist.link_clusters([cluster_info(server)], 5000)
    return linked.errors[0]


def port_of(cluster: Cluster) -> int:
    address = cluster.datadist.listen_address
    assert address is not None
    return address[1]


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """Make a folder with one certificate that is for clusters 1 to 3."""
    return tls_folder(tmp_path / "group", CA.issue([uri_of(each) for each in (1, 2, 3)]), CA)


@pytest.fixture(params=[True, False], ids=["one_sided", "requests"])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": request.param}


# ---- everything that a link is for ----


async def test_blocks_are_pulled_and_pushed_and_notifications_come(group: Path, mode: dict[str, Any]) -> None:
    async with linked_pair(DESC, trust=group, **mode) as (prompt, decoder, source, target):
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [3], [0], notify=b"pulled")
        verify(decoder.memory(target), target, moved(DESC, {0: 3}))
        if mode["enable_remote_cache_accessible"]:
            await prompt.datadist.cache_manager.push_blocks(BlocksCacheKey(2), source, [5], [1])
            verify(decoder.memory(target), target, moved(DESC, {0: 3, 1: 5}))
        large = b"n" * 4096
        await decoder.datadist.notify(1, large)
        notes = prompt.datadist.notifications()
        assert [(await anext(notes)).payload for _ in range(2)] == [b"pulled", large]
        assert prompt.datadist.figures().credentials == {uri_of(2): 1}
        assert decoder.datadist.figures().credentials == {uri_of(1): 1}
        (told,) = decoder.datadist.statistics().links
        assert told.credential == uri_of(1)
        assert told.certificate_seconds is not None
        assert 29 * DAY < told.certificate_seconds <= 30 * DAY
        figures = decoder.datadist.figures()
        assert 29 * DAY < figures.certificates[uri_of(1)] <= 30 * DAY
        assert figures.own_certificate is not None
        assert 29 * DAY < figures.own_certificate <= 30 * DAY


async def test_leased_blocks_are_pulled(group: Path, mode: dict[str, Any]) -> None:
    async with linked_pair(DESC, trust=group, **mode) as (prompt, decoder, source, target):
        lease = prompt.datadist.cache_manager.lease_blocks(source, [2, 7], 60)
        ticket = json.loads(json.dumps(lease.ticket().model_dump(mode="json")))
        await decoder.datadist.cache_manager.pull_leased(ticket, target, [0, 1])
        verify(decoder.memory(target), target, moved(DESC, {0: 2, 1: 7}))


async def test_layers_are_sent_while_the_next_one_is_computed(group: Path) -> None:
    async with linked_pair(DESC, trust=group) as (prompt, decoder, source, target):
        synchronizer = AwaitableLayerSynchronizer(2)
        configs = [TransferWithCacheKeyConfig(BlocksCacheKey(2))]
        task = prompt.datadist.cache_manager.transfer_cache_async(source, synchronizer, configs, [3, 4], [0, 1])
        for layer in range(2):
            synchronizer.ready(layer)
        await task
        verify(decoder.memory(target), target, moved(DESC, {0: 3, 1: 4}))


async def test_members_of_a_communicator_prove_their_certificates(group: Path) -> None:
    """HCCL carries a key for them, too, which takes the place of no certificate."""
    options: dict[str, Any] = {"listen_ip_info": None, "trust": group}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        numbers = await link_all(prompt, decoder, name=f"tls {os.getpid()}")
        for cluster, number in zip((prompt, decoder), numbers, strict=True):
            assert await settled(cluster, number) is RegisterMemStatus.OK
        assert decoder.datadist.figures().credentials == {uri_of(1): 1}
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(decoder.memory(cache), cache, moved(DESC, {0: 3}))


PROCESS = """
import asyncio, sys
from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo
from aiodatadist.testing import open_cluster, verify

async def main(host, port, trust):
    desc = CacheDesc(4, [8, 64], DataType.DT_UINT8)
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    async with open_cluster(2, device_id=1, listen_ip_info=listen, trust=trust) as cluster:
        cache = await cluster.blocks(desc)
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(host, int(port))
        linked = await cluster.datadist.link_clusters([info], 10000)
        print(linked.errors[0], flush=True)
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(cluster.memory(cache), cache, [(t, 0, 1, 3) for t in range(4)])
        await cluster.datadist.unlink_clusters([info], 5000)
        print("pulled", flush=True)

if sys.argv[4] == "uvloop":
    import uvloop
    uvloop.install()
asyncio.run(main(*sys.argv[1:4]))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_two_processes_link_and_pull(host: str, loop: str, tmp_path: Path) -> None:
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    async with open_cluster(1, listen_ip_info=listen, trust=folder_for(tmp_path / "1", 1)) as prompt:
        await prompt.blocks(DESC)
        command = (
            sys.executable,
            "-W",
            "ignore",
            "-c",
            PROCESS,
            host,
            str(port_of(prompt)),
            str(folder_for(tmp_path / "2", 2)),
            loop,
        )
        process = await children.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        said, errors = await process.communicate()
        assert said.decode().split() == ["None", "pulled"], errors.decode()


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make the contexts of a program that has its own ways to certificates."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for each in made:
        each.check_hostname = False
        each.verify_mode = ssl.CERT_REQUIRED
        each.minimum_version = ssl.TLSVersion.TLSv1_3
        each.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        each.load_verify_locations(folder / "ca.crt")
    return made


async def test_contexts_of_the_caller_link_to_a_folder(tmp_path: Path) -> None:
    """The caller renews the certificate in them, and new links prove it."""
    own = folder_for(tmp_path / "2", 2)
    pair = contexts(own)
    async with (
        open_cluster(1, trust=folder_for(tmp_path / "1", 1)) as prompt,
        open_cluster(2, device_id=1, trust=pair) as decoder,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        for client, server in ((decoder, prompt), (prompt, decoder)):
            assert await link(client, server) is None
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
            verify(decoder.memory(cache), cache, moved(DESC, {0: 3}))
            await client.datadist.unlink_clusters([cluster_info(server)], 5000)
        tls_folder(own, OTHER.for_cluster(2), CA)
        pair[0].load_cert_chain(own / "tls.crt", own / "tls.key")
        assert REFUSED in str(await link(decoder, prompt))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("check_hostname", True, "the client's context in trust has check_hostname on: must not"),
        ("minimum_version", ssl.TLSVersion.TLSv1_2, "has minimum_version TLSv1_2: must be TLSv1_3"),
        ("verify_mode", ssl.CERT_OPTIONAL, "has verify_mode CERT_OPTIONAL: must be CERT_REQUIRED"),
    ],
)
def test_a_context_that_breaks_a_rule_is_refused(name: str, value: object, rule: str, tmp_path: Path) -> None:
    client, server = contexts(folder_for(tmp_path / "1", 1))
    setattr(client, name, value)
    with pytest.raises(ParamInvalid, match=rule):
        LLMConfig(trust=(client, server))


def test_contexts_are_in_no_dictionary_and_no_pickle(tmp_path: Path) -> None:
    client, server = contexts(folder_for(tmp_path / "1", 1))
    config = LLMConfig(trust=(client, server))
    assert not any("Trust" in key for key in config.generate_options())
    assert config.model_copy(deep=True).trust is config.trust
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(config)
    with pytest.raises(ParamInvalid, match="the client's context in trust has protocol PROTOCOL_TLS_SERVER: must have"):
        LLMConfig(trust=(server, client))
    with pytest.raises(ParamInvalid, match="trust has 1 contexts: must have two"):
        LLMConfig(trust=(client,))  # type: ignore[arg-type]


def test_calls_without_await_link_over_tls(group: Path) -> None:
    with pairs.linked_pair(trust=str(group)) as pair:
        pair.pull(src=[3], dst=[0])
        pair.target.check({0: (0, 3)})
        (told,) = pair.target.datadist.statistics().links
        assert told.credential == uri_of(1)


# ---- ends that are refused ----


@asynccontextmanager
async def ends(
    tmp_path: Path, client: dict[str, Any], server: dict[str, Any]
) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Open a client (2) and a server (1) with these options."""
    async with open_cluster(2, device_id=1, **client) as decoder, open_cluster(1, **server) as prompt:
        yield decoder, prompt


def tls(path: Path, cluster_id: int, issuer: Authority = CA, trusts: Authority = CA) -> dict[str, Any]:
    return {"trust": tls_folder(path / str(cluster_id), issuer.for_cluster(cluster_id), trusts)}


DOES_NOT_VERIFY = "the peer's certificate does not verify: "
REFUSED = "the peer refused this end's certificate: "


async def all_of(stream: anyio.abc.ByteReceiveStream) -> bytes:
    """Return what comes until the other end closes its connection."""
    heard = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            heard += await stream.receive()
    return heard


@pytest.mark.parametrize("stranger", ["client", "server"])
async def test_an_end_of_another_authority_is_refused_and_both_know_why(
    stranger: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, server = (OTHER, CA) if stranger == "client" else (CA, OTHER)
    async with ends(tmp_path, tls(tmp_path, 2, client), tls(tmp_path, 1, server)) as (decoder, prompt):
        error = await link(decoder, prompt)
        assert isinstance(error, AuthError)
        assert (REFUSED if stranger == "client" else DOES_NOT_VERIFY) in str(error)
        assert error.hint is not None
        assert "ca.crt" in error.hint
        assert not prompt.datadist.statistics().links
    assert (DOES_NOT_VERIFY if stranger == "client" else REFUSED + "unknown ca") in caplog.text


@asynccontextmanager
async def with_certificate(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, certificates: Certificates
) -> AsyncIterator[None]:
    """Let a cluster prove certificates with which it could not be started."""
    with monkeypatch.context() as patched:
        patched.setattr(inside(cluster.datadist).key_ring, "certificates", lambda: certificates)
        yield


def expired(tmp_path: Path, cluster_id: int, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Read an expired certificate, which this end would refuse as well."""
    folder = tls_folder(tmp_path / "expired", CA.issue([uri_of(cluster_id)], valid=(-DAY, -1)), CA)
    with monkeypatch.context() as patched:
        patched.setattr("aiodatadist._config.certificates._try_out", lambda *_: {"notBefore": DATE, "notAfter": DATE})
        return read_certificates(folder)


DATE = "Jan  1 00:00:00 2030 GMT"


@pytest.mark.parametrize("side", ["client", "server"])
async def test_an_expired_certificate_is_refused_and_both_know_why(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ends(tmp_path, tls(tmp_path, 2), tls(tmp_path, 1)) as (decoder, prompt):
        culprit = decoder if side == "client" else prompt
        old = expired(tmp_path, culprit.datadist.cluster_id, monkeypatch)
        async with with_certificate(culprit, monkeypatch, old):
            error = await link(decoder, prompt)
        assert isinstance(error, AuthError)
        reasons = DOES_NOT_VERIFY + "certificate has expired", REFUSED + "certificate expired"
        assert reasons[side == "client"] in str(error)
        assert reasons[side == "server"] in caplog.text
        assert await link(decoder, prompt) is None


@pytest.mark.parametrize("liar", ["client", "server"])
async def test_an_end_that_says_another_id_than_its_certificate_is_refused(
    liar: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The liar says 3. Its word about its id does not count without the certificate."""
    async with ends(tmp_path, tls(tmp_path, 2), tls(tmp_path, 1)) as (decoder, prompt):
        culprit = decoder if liar == "client" else prompt
        true = culprit.datadist.cluster_id
        info = cluster_info(prompt)
        inside(culprit.datadist).cluster_id = 3
        if liar == "server":
            info.remote_cluster_id = 3
        linked = await decoder.datadist.link_clusters([info], 5000)
        error = linked.errors[0]
        assert isinstance(error, IncompatiblePeer)
        why = f"its certificate is for cluster {true}, it says 3"
        assert why in str(error)
        assert why in caplog.text
        assert not prompt.datadist.statistics().links


async def test_a_client_without_a_certificate_is_refused_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ends(tmp_path, tls(tmp_path, 2), tls(tmp_path, 1)) as (decoder, prompt):
        own = inside(decoder.datadist).key_ring.certificates()
        assert own is not None
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_REQUIRED
        bare.load_verify_locations(cadata=CA.certificate.decode())
        async with with_certificate(decoder, monkeypatch, Certificates(bare, own.server, own.names, 0, 2**40, "", {})):
            error = await link(decoder, prompt)
        assert isinstance(error, AuthError)
        assert REFUSED + "certificate required" in str(error)
        assert "the peer showed no certificate: must show one" in caplog.text


KEYS = {"auth_key": bytes.fromhex(HEX)}


@pytest.mark.parametrize("other", [KEYS, {"trust": "none"}], ids=["a key", "nothing"])
@pytest.mark.parametrize("side", ["client", "server"])
async def test_an_end_that_proves_something_else_is_refused_and_both_know_why(
    side: str, other: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``side`` proves a certificate, and the other end a key or nothing."""
    client, server = (tls(tmp_path, 2), other) if side == "client" else (other, tls(tmp_path, 1))
    async with ends(tmp_path, client, server) as (decoder, prompt):
        error = await link(decoder, prompt)
        assert isinstance(error, AuthError)
        why = (
            f"the client proves a certificate, the listener has {'keys' if other is KEYS else 'no credential'}"
            if side == "client"
            else "the listener proves a certificate: the client must begin TLS"
        )
        assert f"an unproved peer refused: {why}" in str(error)
        assert why in caplog.text
        assert "ca.crt" in (error.hint or ""), "a key alone mends nothing"
        assert not error.is_proved


async def test_a_stranger_that_speaks_without_tls_is_told_how_to_and_nothing_else(tmp_path: Path) -> None:
    async with open_cluster(1, **tls(tmp_path, 1)) as prompt:
        async with await anyio.connect_tcp("127.0.0.1", port_of(prompt)) as stream:
            await stream.send(encode(Refuse(status=1, reason="x")))
            (said,) = Decoder().feed(await stream.receive())
            assert isinstance(said, Refuse)
            assert said.reason == "the listener proves a certificate: the client must begin TLS"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\x05hello", b"\0" * 64):
            async with await anyio.connect_tcp("127.0.0.1", port_of(prompt)) as stream:
                await stream.send(noise)
                assert b"cluster" not in await all_of(stream)
        assert not prompt.datadist.statistics().links


# ---- before the proof ----


@pytest.mark.autojump
async def test_a_slow_handshake_of_tls_has_the_time_of_any_proof(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sends a byte of its first record each second."""
    async with open_cluster(1, **tls(tmp_path, 1)) as prompt:
        pipe = TlsPipe("client", read_certificates(tls(tmp_path, 2)["trust"]))
        pipe.shake()
        first, began = pipe.outgoing(), anyio.current_time()
        async with (
            await anyio.connect_tcp("127.0.0.1", port_of(prompt)) as stream,
            anyio.create_task_group() as group,
        ):

            async def trickle() -> None:
                for byte in first:
                    await stream.send(bytes([byte]))
                    await anyio.sleep(1)

            group.start_soon(trickle)
            assert await all_of(stream) == b""
            group.cancel_scope.cancel()
        assert CLIENT_TIMEOUT <= anyio.current_time() - began <= CLIENT_TIMEOUT + 1.5
        assert f"the client did not identify itself within {CLIENT_TIMEOUT:g} s" in caplog.text


async def test_half_made_handshakes_of_tls_make_room_for_a_cluster_that_links(tmp_path: Path) -> None:
    """More than an address may have: the oldest give way, and each is a connection without a link."""
    async with ends(tmp_path, tls(tmp_path, 2), tls(tmp_path, 1)) as (decoder, prompt), AsyncExitStack() as stack:
        own = read_certificates(tls(tmp_path, 2)["trust"])
        streams = []
        for _ in range(70):
            pipe = TlsPipe("client", own)
            pipe.shake()
            stream = await stack.enter_async_context(
                await anyio.connect_tcp("127.0.0.1", port_of(prompt), local_host="127.0.0.1")
            )
            await stream.send(pipe.outgoing())
            streams.append(stream)
        assert await link(decoder, prompt) is None
        assert not inside(prompt.datadist).links.opening
        await all_of(streams[0])


# ---- on the way ----


async def test_a_byte_that_is_changed_on_the_way_ends_the_link(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, trust=group) as (_, decoder, _, _):
        seal = TlsPipe.seal

        def damaged(pipe: TlsPipe, data: bytes) -> bytes:
            sealed = bytearray(seal(pipe, data))
            sealed[-1] ^= 1
            return bytes(sealed)

        with monkeypatch.context() as patched:
            patched.setattr(TlsPipe, "seal", damaged)
            with pytest.raises(LinkError):
                await decoder.datadist.check_link_status(1)
        why = await decoder.datadist.wait_link_closed(1)
        assert "changed or added" in why or "gone" in why


# ---- rotation ----


async def test_certificates_and_authorities_are_replaced_while_links_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At each step the ends trust both authorities, or have a certificate of the one that both trust."""
    caplog.set_level(logging.INFO)
    folders = {1: tmp_path / "1", 2: tmp_path / "2", 3: tmp_path / "3"}

    def step(cluster_id: int, issuer: Authority, *trusted: Authority) -> None:
        tls_folder(folders[cluster_id], issuer.for_cluster(cluster_id), *trusted)

    for each in folders:
        step(each, CA, CA)
    async with (
        open_cluster(1, trust=folders[1]) as prompt,
        open_cluster(2, device_id=1, trust=folders[2]) as decoder,
        open_cluster(3, device_id=2, trust=folders[3]) as other,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        assert await link(decoder, prompt) is None
        for issuer, trusted in ((CA, (CA, OTHER)), (OTHER, (CA, OTHER)), (OTHER, (OTHER,))):
            for cluster_id in (1, 3):
                step(cluster_id, issuer, *trusted)
                for client, server in ((other, prompt), (prompt, other)):
                    assert await link(client, server) is None, (issuer, trusted, cluster_id)
                    await client.datadist.unlink_clusters([cluster_info(server)], 5000)
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert [each.generation for each in decoder.datadist.statistics().links] == [1]
        await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        error = await link(decoder, prompt)
        assert isinstance(error, AuthError), "its certificate is of the removed authority"
        assert DOES_NOT_VERIFY in str(error)
    assert re.search(
        rf"cluster 1: new links prove the certificate {uri_of(1)}, which expires on \d+-\d\d-\d\d ", caplog.text
    )


async def test_a_certificate_that_can_no_longer_be_used_links_nothing_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is told no path; the log is."""
    folder = tls(tmp_path, 1)["trust"]
    async with ends(tmp_path, tls(tmp_path, 2), {"trust": folder}) as (decoder, prompt):
        (folder / "tls.key").chmod(0o604)
        error = await link(decoder, prompt)
        assert error is not None
        assert str(folder) not in str(error)
        assert "tls.key' has mode 0604: users outside its group must not be able to read it" in caplog.text
        own = await link(prompt, decoder)
        assert isinstance(own, AuthError)
        assert "has mode 0604" in str(own)
        (folder / "tls.key").chmod(0o600)
        assert await link(decoder, prompt) is None


async def test_a_certificate_that_expires_while_its_cluster_runs_is_not_proved_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ends(tmp_path, tls(tmp_path, 2), tls(tmp_path, 1)) as (decoder, prompt):
        own = inside(decoder.datadist).key_ring.certificates()
        assert own is not None
        monkeypatch.setattr("aiodatadist._cluster.key_ring.time.time", lambda: own.expires)
        error = await link(decoder, prompt)
        assert isinstance(error, AuthError)
        assert "tls.crt' expired on " in str(error)


# ---- who decides that a link ends ----


@pytest.mark.parametrize("restart", ["trusted", None])
async def test_a_process_with_the_certificate_of_a_live_link_replaces_it_only_if_the_policy_says_so(
    restart: str | None, tmp_path: Path
) -> None:
    """The other process has certificate and id of cluster 2, as it has after a restart of which this end knows nothing."""
    folder = tls(tmp_path, 1)["trust"]
    may = ["link", "read"]
    rules = {"version": 1, "clusters": [{"match": {"spiffe": "spiffe://test/kv/cluster/*"}, "may": may}]}
    policy_in(folder, rules if restart is None else rules | {"restart": restart})
    theirs = tls_folder(tmp_path / "2", CA.issue([uri_of(2), uri_of(102)]), CA)
    async with (
        open_cluster(1, trust=folder) as prompt,
        open_cluster(2, device_id=1, trust=theirs) as decoder,
        open_cluster(102, device_id=2, trust=theirs) as rival,
    ):
        assert await link(decoder, prompt) is None
        inside(rival.datadist).cluster_id = 2  # a second process with the id is refused at init() in one process only
        error = await link(rival, prompt)
        generations = [each.generation for each in prompt.datadist.statistics().links]
        if restart is None:
            assert error is not None
            assert "another process has this id" in str(error)
            assert generations == [1]
            return
        assert error is None
        await decoder.datadist.wait_link_closed(1)
        assert generations == [2]


async def test_a_key_does_not_replace_a_live_link_whatever_the_policy_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "trust", f"a {HEX}")
    rules = {"version": 1, "clusters": [{"match": {"key": "a"}, "may": ["link"]}], "restart": "trusted"}
    policy_in(folder, rules)
    async with (
        open_cluster(1, trust=folder) as prompt,
        open_cluster(2, device_id=1, trust=folder) as decoder,
        open_cluster(102, device_id=2, trust=folder) as rival,
    ):
        assert await link(decoder, prompt) is None
        inside(rival.datadist).cluster_id = 2
        assert "another process has this id" in str(await link(rival, prompt))
        assert [each.generation for each in prompt.datadist.statistics().links] == [1]


class Impostor:
    """A process that holds a cluster's port, and proves a certificate that is not that cluster's."""

    def __init__(self, own: Certificates) -> None:
        self._own = own
        self.met = 0
        self.news = Signal()

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        pipe, is_complete = TlsPipe("server", self._own), False
        async with client:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, LinkError):
                while not is_complete:
                    try:
                        is_complete = pipe.shake(await client.receive())
                    finally:
                        await client.send(pipe.outgoing())
                await all_of(client)
            self.met += 1
            self.news.wake()

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[None]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, self.serve)
            yield
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("issuer", "trusts"),
    [(OTHER, CA), (CA, OTHER)],
    ids=["does not verify", "is of another cluster, which refuses ours"],
)
async def test_a_process_with_another_certificate_at_a_clusters_port_does_not_end_relinking(
    issuer: Authority, trusts: Authority, tmp_path: Path, group: Path
) -> None:
    """The second one is a member of the group, whose refusal is proved: it still decides nothing about cluster 1."""
    impostor = Impostor(read_certificates(tls_folder(tmp_path / "7", issuer.for_cluster(7), trusts)))
    async with waiting_pair(trust=group) as (_, decoder, _, cache, door, changes):
        async with impostor.at(door.port):
            while impostor.met < 4:
                await impostor.news.wait()
        await door.open()
        told = await until(changes, LINKED, GIVEN_UP)
        assert phases(told) == [(LINKED, 2)]
        await pulled(decoder, cache, 3, 4)


async def test_a_cluster_that_refuses_the_certificate_of_this_end_ends_relinking(tmp_path: Path, group: Path) -> None:
    """The cluster has proved itself, and says that the certificate of this end does not verify."""
    async with waiting_pair(trust=group) as (prompt, _, _, _, door, changes):
        cluster = inside(prompt.datadist)
        strict = read_certificates(tls_folder(tmp_path / "strict", CA.for_cluster(1), OTHER))
        cluster.key_ring.certificates = lambda: strict  # type: ignore[method-assign]
        await door.open()
        told = await until(changes, LINKED, GIVEN_UP)
        assert phases(told) == [(GIVEN_UP, 1)]
        assert REFUSED + "unknown ca" in str(told[-1].reason)


# ---- what a peer may do ----


async def test_the_name_in_a_peers_certificate_decides_what_it_may_do(tmp_path: Path) -> None:
    """A URI below the path of the rule may read. Another one may not even link, whatever id it has."""
    folder = tls(tmp_path, 1)["trust"]
    rule = {"match": {"spiffe": "spiffe://test/decode/*"}, "ids": "2-9", "may": ["link", "read"]}
    policy_in(folder, {"version": 1, "clusters": [rule]})
    good = tls_folder(tmp_path / "2", CA.issue([uri_of(2, "decode")]), CA)
    async with (
        open_cluster(1, trust=folder) as prompt,
        open_cluster(2, device_id=1, trust=good) as decoder,
        open_cluster(3, device_id=2, **tls(tmp_path, 3)) as other,
        open_cluster(
            10, device_id=3, trust=tls_folder(tmp_path / "10", CA.issue([uri_of(10, "decode")]), CA)
        ) as beyond,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        assert await link(decoder, prompt) is None
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(decoder.memory(cache), cache, moved(DESC, {0: 3}))
        for stranger, name in ((other, uri_of(3)), (beyond, uri_of(10, "decode"))):
            error = await link(stranger, prompt)
            assert f"does not let cluster {stranger.datadist.cluster_id} with certificate {name} link" in str(error)


async def test_a_dns_name_stands_for_the_ids_that_the_policy_lists(tmp_path: Path) -> None:
    rule = {"match": {"dns": "decode.test"}, "ids": "2", "may": ["link"]}
    folders = {}
    for cluster_id, names in ((1, [uri_of(1)]), (2, []), (3, [])):
        own = CA.issue(names, [] if names else ["decode.test"])
        folders[cluster_id] = tls_folder(tmp_path / str(cluster_id), own, CA)
        policy_in(folders[cluster_id], {"version": 1, "clusters": [rule], "otherwise": ["link"]})
    async with (
        open_cluster(1, trust=folders[1]) as prompt,
        open_cluster(2, device_id=1, trust=folders[2]) as decoder,
    ):
        assert await link(decoder, prompt) is None
        assert prompt.datadist.figures().credentials == {"decode.test": 1}
    with pytest.raises(ParamInvalid, match=r"tls.crt' is for cluster 2: must be for cluster 3"):
        async with open_cluster(3, trust=folders[3]):
            pytest.fail("it is open")


async def test_a_folder_with_keys_and_certificates_is_used_as_its_policy_says(tmp_path: Path) -> None:
    folders = [tls(tmp_path, cluster_id)["trust"] for cluster_id in (1, 2)]
    for mode, credential in (("tls", uri_of(1)), ("keys", "a")):
        for folder in folders:
            folder_of(folder, f"a {HEX}")
            policy_in(folder, {"version": 1, "clusters": [], "otherwise": ["link"], "mode": mode})
        async with (
            open_cluster(1, trust=folders[0]) as prompt,
            open_cluster(2, device_id=1, trust=folders[1]) as decoder,
        ):
            assert await link(decoder, prompt) is None
            assert decoder.datadist.figures().credentials == {credential: 1}
