"""The way of a link's bytes: the whole table, and that both ends come to the same, whatever they say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import IncompatiblePeer
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import Connect, EndpointInfo
from aiodatadist._wire.ways import connections_between, option_of, way_between, ways_of
from tests.unit.wire.examples import endpoint, hello, vouching

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"transport": "hccl", "streams": 4},
    "hccl": {"transport": "hccl", "streams": 0},
    "tcp": {"transport": "tcp", "streams": 4},
    "loopback": {"transport": "loopback", "streams": 0},
    "other": {"transport": "other", "streams": 4},
}
"""What an end with each option says, and one of a newer version."""
HERE = "user:[1] pid:[2] net:[3]"
PLACES: dict[str, dict[str, Any]] = {
    "here": {},
    "other machine": {"host": "other:0"},
    "other user": {"host": "boot:1000"},
    "other network": {"meeting": "user:[1] pid:[2] net:[9]"},
    "other container": {"meeting": "user:[1] pid:[9] net:[3]"},
    "a folder": {"meeting": "user:[1] pid:[2] folder:[7:8]"},
    "unknown": {"meeting": ""},
    "same device": {"process": 1, "device_id": "0"},
    "same process": {"process": 1},
}
"""What the other end says of where it is, beside this one, which is process 1 with device 0."""
REACHED = {"here", "same process"}


def end(option: str, **changes: Any) -> EndpointInfo:
    return endpoint(**{"meeting": HERE, **OPTIONS[option], **changes})


OF_TWO: dict[tuple[str, str], str] = {
    ("auto", "hccl"): "hccl",
    ("hccl", "hccl"): "hccl",
    ("tcp", "tcp"): "tcp",
    ("loopback", "loopback"): "loopback",
    ("other", "other"): "other",
}
"""The way of two options of which not both are ``auto``, and that do not depend on a proof."""


def expected(options: set[str], place: str, runtimes: tuple[str, str], is_proved: bool) -> str:
    """Return what the table of the module says, without its code."""
    if options == {"auto"}:
        reaches = runtimes == ("ascend", "ascend") or (runtimes == ("soft", "soft") and place in REACHED)
        return "hccl" if reaches or not is_proved else "tcp"
    if options == {"auto", "tcp"}:
        return "tcp" if is_proved else ""
    one, other = sorted(options) * (3 - len(options))
    return OF_TWO.get((one, other), "")


@pytest.mark.parametrize("is_proved", [False, True], ids=["unproved", "proved"])
def test_the_whole_table(is_proved: bool) -> None:
    cases = 0
    for one, other, place, mine, theirs in product(
        OPTIONS, OPTIONS, PLACES, ("soft", "ascend"), ("soft", "ascend", "else")
    ):
        a = end(one, runtime=mine)
        b = end(other, **{"runtime": theirs, "process": 2, "device_id": "1", **PLACES[place]})
        way = way_between(a, b, is_proved)
        assert way == way_between(b, a, is_proved), "both ends come to the same"
        assert way == expected({one, other}, place, (mine, theirs), is_proved), (one, other, place, mine, theirs)
        cases += 1
    assert cases == 5 * 5 * 9 * 2 * 3


words = st.sampled_from(["", "hccl", "tcp", "loopback", "soft", "ascend", "boot:0", "boot:1", HERE, "0", "1"])
hostile = st.builds(
    endpoint,
    transport=words,
    runtime=words,
    host=words,
    device_id=words,
    process=st.integers(0, 2),
    streams=st.integers(0, 32),
    meeting=words,
)


@given(hostile, hostile, st.booleans())
def test_both_ends_come_to_the_same_whatever_they_say(one: EndpointInfo, other: EndpointInfo, is_proved: bool) -> None:
    way = way_between(one, other, is_proved)
    assert way == way_between(other, one, is_proved)
    count = connections_between(way, one, other)
    assert count == connections_between(way, other, one) <= min(one.streams, other.streams)
    assert count or way != "tcp"


@given(st.sampled_from(sorted(OPTIONS)), hostile, st.booleans())
def test_no_hello_brings_an_end_to_what_its_option_does_not_allow(
    option: str, hostile: EndpointInfo, is_proved: bool
) -> None:
    mine = end(option)
    way = way_between(mine, hostile, is_proved)
    assert way in {"", *ways_of(mine, is_proved)}
    if option == "auto" and not is_proved:
        assert way != "tcp", "bytes would be open to every user of the machine"
    if option == "hccl":
        assert connections_between(way, mine, hostile) == 0


def test_an_end_with_auto_looks_to_an_older_one_like_hccl() -> None:
    assert end("auto").transport == "hccl"
    assert option_of(end("auto")) == "auto"
    assert [option_of(end(option)) for option in ("hccl", "tcp", "loopback")] == ["hccl", "tcp", "loopback"]
    older = endpoint(transport="hccl")
    assert (older.streams, older.meeting) == (0, "")
    assert way_between(end("auto"), older, True) == "hccl"


# ---- in a handshake ----


def handshake(mine: EndpointInfo, theirs: EndpointInfo, is_proved: bool) -> Handshake:
    """Return a client that has met a server."""
    made = Handshake("client", hello(2, has_key=is_proved, endpoint=mine), vouching if is_proved else None)
    made.start(Connect(channel="channel", timeout=3.0))
    made.receive(hello(1, has_key=is_proved, endpoint=theirs))
    return made


def test_a_handshake_knows_the_way() -> None:
    far = end("auto", host="other:0", process=2)
    assert handshake(end("auto"), far, True).way == "tcp"
    assert handshake(end("auto"), far, False).way == "hccl"
    assert handshake(end("auto"), end("tcp"), True).way == "tcp"
    assert handshake(end("auto", runtime="ascend"), end("auto"), True).way == "tcp"


@pytest.mark.parametrize(
    ("mine", "theirs", "is_proved", "words"),
    [
        (end("auto"), end("loopback"), True, "transport differs: auto at cluster 2, loopback at cluster 1"),
        (end("hccl"), end("tcp"), True, "transport differs: hccl at cluster 2, tcp at cluster 1"),
        (end("auto"), end("tcp"), False, "'auto' does not take TCP without them"),
        (end("tcp"), end("auto"), False, "transport differs: tcp at cluster 2, auto at cluster 1"),
        (end("auto"), end("auto", runtime="ascend"), False, "runtime differs: soft at cluster 2, ascend at cluster 1"),
        (end("auto"), end("hccl", runtime="ascend"), True, "runtime differs: soft at cluster 2, ascend at cluster 1"),
    ],
)
def test_ends_without_a_common_way_are_told_both_options(
    mine: EndpointInfo, theirs: EndpointInfo, is_proved: bool, words: str
) -> None:
    with pytest.raises(IncompatiblePeer) as refused:
        handshake(mine, theirs, is_proved)
    assert words in str(refused.value)
