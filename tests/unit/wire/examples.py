"""Messages for tests: plausible ones by name, one of each kind, and arbitrary ones for hypothesis."""

from __future__ import annotations

import base64
import string
from typing import Any

from hypothesis import strategies as st

from aiodatadist._values.peer_budget import MAX_STREAMS
from aiodatadist._wire.key_proof import heartbeat_key
from aiodatadist._wire.messages import (
    MAX_TENSORS,
    MINOR,
    PLAIN_PROTOCOL,
    PROTOCOL,
    Accept,
    AttachData,
    AttachHeartbeats,
    Broken,
    Bye,
    CacheEntry,
    Claim,
    Claimed,
    Connect,
    Digest,
    Digests,
    Disconnect,
    EndpointInfo,
    Found,
    Grant,
    Hello,
    Hello1,
    KeyName,
    Landed,
    Lookup,
    Message,
    Note,
    Outdated,
    Own,
    Owned,
    Ping,
    Pong,
    Pull,
    Pulled,
    Ready,
    Refuse,
    Renew,
    Renewed,
    Retire,
    Revoke,
    Revoked,
    Stop,
    Taken,
    Unclaim,
    Unsupported,
    Watch,
    Welcome,
)
from aiodatadist._wire.proved import Proved


def endpoint(**changes: Any) -> EndpointInfo:
    values: dict[str, Any] = {
        "transport": "hccl",
        "runtime": "soft",
        "host": "boot:0",
        "server_id": "127.0.0.1",
        "device_id": "0",
        "device_ip": "127.0.0.1",
        "process": 1,
    }
    return EndpointInfo(**(values | changes))


def hello(cluster_id: int, *, has_key: bool = False, **changes: Any) -> Hello:
    values: dict[str, Any] = {
        "protocol": PROTOCOL if has_key else PLAIN_PROTOCOL,
        "cluster_id": cluster_id,
        "role": 3,
        "instance": f"{cluster_id:064x}",
        "nonce": f"{cluster_id + 0xABCDEF:064x}",
        "one_sided": True,
        "has_key": has_key,
        "heartbeat": 1.0,
        "endpoint": endpoint(),
        "minor": MINOR,
    }
    return Hello(**(values | changes))


def entry(**changes: Any) -> CacheEntry:
    values: dict[str, Any] = {
        "cache_id": 1,
        "blocks": True,
        "placement": 1,
        "data_type": 1,
        "pieces": 4,
        "stride": 64,
        "addresses": [4096],
        "epoch": 0,
    }
    return CacheEntry(**(values | changes))


def digest(**changes: Any) -> Digest:
    values: dict[str, Any] = {
        "call": 1,
        "cache_id": 1,
        "first_tensor": 0,
        "tensors": 2,
        "offset": 0,
        "step": 64,
        "nbytes": 64,
        "tail": 64,
        "indexes": [3, 1],
        "seconds": 1.0,
    }
    return Digest(**(values | changes))


def pull(**changes: Any) -> Pull:
    values: dict[str, Any] = {
        "call": 1,
        "name": KeyName(kind="request", id=7, model_id=0),
        "slot": 0,
        "target": 1,
        "src_layers": (1, 3),
        "dst_layers": (0, 2),
        "tensors_per_layer": 2,
        "src_blocks": [5, 6],
        "dst_blocks": [0, 1],
        "dst_slot": 0,
        "nbytes": 0,
        "seconds": 1.0,
    }
    return Pull(**(values | changes))


EACH: list[Message] = [
    hello(1),
    Hello1(protocols=[5], nonce="0" * 64, key_names=["first"]),
    Welcome(protocol=5, nonce="1" * 64, key_name="first", confirmation="2" * 64),
    Connect(channel="channel", timeout=3.0),
    Accept(),
    Ready(epoch=1, heartbeat_token="0" * 64),
    Refuse(status=-1, reason="no"),
    Disconnect(reason="enough"),
    Bye(),
    AttachHeartbeats(token="0" * 64),
    AttachData(channel="0" * 64, index=31, nonce="1" * 64, proof="2" * 64),
    Lookup(call=1, name=KeyName(kind="prefix", id=7, model_id=1)),
    Found(call=1, cache=entry(), slot=1),
    Grant(cache=entry()),
    Revoke(cache_id=1, seconds=1.0),
    Revoked(cache_id=1),
    pull(),
    Stop(call=1),
    Pulled(call=1, status=0, reason=""),
    digest(),
    Digests(call=1, status=0, checksums=[1, 2**32 - 1]),
    Note(payload="YQ=="),
    Taken(),
    Ping(call=1),
    Pong(call=1),
    Own(call=1, on=True),
    Owned(call=1, on=False),
    Claim(call=1, lease="0" * 32, seconds=1.5, patience=0.0, blocks_digest="1" * 32, prompt_digest="2" * 32),
    Claimed(call=1, kept=False, seconds=1.5, why="other blocks"),
    Unclaim(call=0, lease="f" * 32, end="taken", blocks_digest="1" * 32, prompt_digest="2" * 32),
    Renew(channel="channel", seconds=1.0),
    Renewed(channel="channel", epoch=1),
    Retire(channel="channel"),
    Broken(channel="channel"),
    Outdated(call=1, mine=1, yours=2),
    Watch(cache_id=1, on=True),
    Landed(cache_id=1, first=0, stop=2, tensors=2),
    Unsupported(kind="inquire", call=1),
]
"""One of each kind."""

uint32 = st.integers(0, 2**32 - 1)
uint63 = st.integers(0, 2**63 - 1)
uint64 = st.integers(0, 2**64 - 1)
checksums = st.lists(uint32, max_size=4)
ids = st.integers(1, 2**63 - 1)
digests = st.one_of(st.just(""), st.binary(min_size=16, max_size=16).map(bytes.hex))
lease_names = st.text("0123456789abcdef", min_size=32, max_size=32)
hexes = st.text(string.hexdigits[:16], min_size=64, max_size=64)
names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
channels = st.text(string.ascii_letters + string.punctuation, min_size=1, max_size=127)
seconds = st.floats(0, 10 * 86400, exclude_min=True)
statuses = st.integers(-1, 2**32 - 1)
figures = st.floats(0, 1e9)
endpoints = st.builds(
    EndpointInfo,
    **{**dict.fromkeys(EndpointInfo.model_fields, names), "process": uint32, "streams": st.integers(0, MAX_STREAMS)},
)
roles = st.sampled_from([1, 2, 3])
hellos = st.builds(
    Hello,
    protocol=uint32,
    cluster_id=uint64,
    role=roles,
    instance=hexes,
    nonce=hexes,
    heartbeat=st.floats(0.01, 600),
    endpoint=endpoints,
    minor=st.integers(MINOR, 2**32 - 1),
)
key_names = st.builds(KeyName, kind=st.sampled_from(["blocks", "request", "prefix", "id"]), id=uint64, model_id=uint64)
layer_ranges = st.none() | st.tuples(uint32, uint32)
block_lists = st.lists(uint64, max_size=4)


@st.composite
def entries(draw: st.DrawFn) -> CacheEntry:
    pieces, stride = draw(st.integers(1, 2**16)), draw(st.integers(1, 2**30))
    return CacheEntry(
        cache_id=draw(ids),
        blocks=draw(st.booleans()),
        placement=draw(st.sampled_from((0, 1))),
        data_type=draw(uint32),
        pieces=pieces,
        stride=stride,
        addresses=draw(st.lists(st.integers(0, 2**64 - pieces * stride), min_size=1, max_size=4)),
        epoch=draw(uint32),
    )


messages: st.SearchStrategy[Message] = st.one_of(
    hellos,
    st.builds(
        Hello1,
        protocols=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
        nonce=hexes,
        key_names=st.lists(st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True), min_size=1, max_size=16),
        opens=st.sampled_from(["link", "heartbeats"]),
    ),
    st.builds(
        Welcome,
        protocol=st.integers(0, 2**32 - 1),
        nonce=hexes,
        key_name=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
        confirmation=hexes,
    ),
    st.just(Accept()),
    st.builds(Connect, channel=channels, timeout=seconds),
    st.builds(Ready, epoch=uint32, heartbeat_token=hexes),
    st.builds(Refuse, status=statuses, reason=names),
    st.builds(Disconnect, reason=names),
    st.just(Bye()),
    st.builds(AttachHeartbeats, token=hexes),
    st.builds(
        AttachData,
        channel=hexes,
        index=st.integers(0, MAX_STREAMS - 1),
        plain=st.booleans(),
        nonce=hexes,
        proof=hexes,
    ),
    st.builds(Lookup, call=ids, name=key_names),
    st.builds(Found, call=ids, cache=st.none() | entries(), slot=uint32),
    st.builds(Grant, cache=entries()),
    st.builds(Revoke, cache_id=ids, seconds=seconds),
    st.builds(Revoked, cache_id=ids),
    st.builds(
        Pull,
        call=ids,
        name=key_names,
        slot=uint32,
        target=ids,
        src_layers=layer_ranges,
        dst_layers=layer_ranges,
        tensors_per_layer=st.integers(1, 2**32 - 1),
        src_blocks=block_lists,
        dst_blocks=block_lists,
        dst_slot=uint32,
        nbytes=uint63,
        seconds=seconds,
        checksum=st.booleans(),
        priority=st.sampled_from([0, 1, 2]),
        also=st.lists(st.tuples(ids, block_lists, block_lists), max_size=3),
    ),
    st.builds(Stop, call=ids),
    st.builds(
        Pulled,
        call=ids,
        stopped=st.booleans(),
        status=statuses,
        reason=names,
        nbytes=uint64,
        ranges=uint64,
        queue_seconds=figures,
        transfer_seconds=figures,
        checksums=checksums,
        also=st.lists(st.tuples(ids, uint64, uint64, figures, figures), max_size=3),
    ),
    st.builds(
        Digest,
        call=ids,
        cache_id=ids,
        first_tensor=uint32,
        tensors=st.integers(1, 4096),
        offset=uint63,
        step=ids,
        nbytes=ids,
        tail=ids,
        indexes=st.lists(uint64, min_size=1, max_size=4),
        seconds=seconds,
    ),
    st.builds(Digests, call=ids, status=statuses, reason=names, checksums=checksums),
    st.builds(Note, payload=st.binary(max_size=50).map(lambda data: base64.b64encode(data).decode())),
    st.just(Taken()),
    st.builds(Ping, call=ids),
    st.builds(Pong, call=ids),
    st.builds(Own, call=ids, on=st.booleans()),
    st.builds(Owned, call=ids, on=st.booleans()),
    st.builds(
        Claim,
        call=ids,
        lease=lease_names,
        seconds=seconds,
        patience=st.floats(0, 864_000),
        blocks_digest=digests,
        prompt_digest=digests,
    ),
    st.builds(Claimed, call=ids, kept=st.booleans(), seconds=st.floats(0, 864_000), why=names),
    st.builds(
        Unclaim,
        call=ids,
        lease=lease_names,
        end=st.sampled_from(["taken", "released", "failed"]),
        blocks_digest=digests,
        prompt_digest=digests,
    ),
    st.builds(Renew, channel=channels, seconds=seconds),
    st.builds(Renewed, channel=channels, epoch=uint32, reason=names),
    st.builds(Retire, channel=channels),
    st.builds(Broken, channel=channels),
    st.builds(Outdated, call=ids, mine=uint32, yours=uint32),
    st.builds(Watch, cache_id=ids, on=st.booleans()),
    st.builds(
        Landed,
        cache_id=ids,
        first=uint32,
        stop=uint32,
        status=statuses,
        reason=names,
        tensors=st.integers(0, MAX_TENSORS),
    ),
    st.builds(Unsupported, kind=names, call=ids),
)


def vouching(*_: Hello) -> Proved:
    """Vouch for any peer, as a key does that a group shares."""
    return Proved("a key", heartbeat_key(bytes(64)))
