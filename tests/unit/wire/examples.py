"""Messages for tests: plausible ones by name, and arbitrary ones for hypothesis."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

from aiodatadist.wire.messages import (
    Accept,
    Bye,
    CacheEntry,
    Connect,
    Disconnect,
    EndpointInfo,
    Hello,
    Message,
    Proof,
    Ready,
    Refuse,
    SlotKey,
)


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
        "cluster_id": cluster_id,
        "role": 3,
        "instance": f"{cluster_id:064x}",
        "nonce": f"{cluster_id + 0xABCDEF:064x}",
        "one_sided": True,
        "has_key": has_key,
        "endpoint": endpoint(),
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
    }
    return CacheEntry(**(values | changes))


uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
hexes = st.text(string.hexdigits[:16], min_size=64, max_size=64)
names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
endpoints = st.builds(EndpointInfo, **{**dict.fromkeys(EndpointInfo.model_fields, names), "process": uint32})
roles = st.sampled_from([1, 2, 3])
hellos = st.builds(
    Hello, protocol=uint32, cluster_id=uint64, role=roles, instance=hexes, nonce=hexes, endpoint=endpoints
)


@st.composite
def entries(draw: st.DrawFn) -> CacheEntry:
    pieces, stride = draw(st.integers(1, 2**16)), draw(st.integers(1, 2**30))
    slot = st.builds(
        SlotKey,
        kind=st.sampled_from(["request", "prefix"]),
        id=uint64,
        model_id=uint64,
        batch_index=st.integers(0, pieces - 1),
    )
    return CacheEntry(
        cache_id=draw(st.integers(0, 2**63 - 1)),
        blocks=draw(st.booleans()),
        placement=draw(st.sampled_from((0, 1))),
        data_type=draw(uint32),
        pieces=pieces,
        stride=stride,
        addresses=draw(st.lists(st.integers(0, 2**64 - pieces * stride), min_size=1, max_size=4)),
        model_id=draw(st.none() | uint64),
        keys=draw(st.lists(slot, max_size=3)),
    )


messages: st.SearchStrategy[Message] = st.one_of(
    hellos,
    st.builds(Proof, mac=hexes),
    st.just(Accept()),
    st.builds(
        Connect,
        channel=st.text(string.ascii_letters + string.punctuation, min_size=1, max_size=127),
        timeout=st.floats(0, 86400, exclude_min=True),
    ),
    st.builds(Ready, caches=st.lists(entries(), max_size=3)),
    st.builds(Refuse, status=st.integers(-1, 2**32 - 1), reason=names),
    st.builds(Disconnect, reason=names),
    st.just(Bye()),
)
