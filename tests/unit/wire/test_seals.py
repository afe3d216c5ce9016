"""Seals: only who has the key makes them, and each counter counts once."""

from __future__ import annotations

import itertools
import tracemalloc
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import ProtocolError
from aiodatadist._wire.frames import HEAD, MAGIC, MAX_BODY, SEALED_VERSION, VERSION, Decoder, Unknown, encode
from aiodatadist._wire.messages import Bye, Message, Ping
from aiodatadist._wire.seals import TRAILER, WINDOW, Opener, Sealer
from tests.unit.wire.examples import EACH, messages

KEY, OTHER = b"k" * 32, b"o" * 32


def opened() -> tuple[Decoder, list[None]]:
    """Return a decoder with a key, and the list of what it ignored."""
    decoder, ignored = Decoder(), list[None]()
    opener = Opener(KEY)
    opener.on_repeated = lambda: ignored.append(None)
    decoder.open_with(opener)
    return decoder, ignored


def test_a_seal_is_keyed_blake2b_over_head_content_and_counter() -> None:
    sealer = Sealer(KEY)
    for number in range(3):
        frame = encode(Bye(), sealer=sealer)
        said, counter, seal = frame[:-TRAILER], frame[-TRAILER:-16], frame[-16:]
        assert HEAD.unpack_from(frame) == (MAGIC, SEALED_VERSION, len(frame) - HEAD.size)
        assert said[HEAD.size :] == b'{"type":"bye"}', "a sealed frame has no other checksum"
        assert int.from_bytes(counter, "big") == number
        assert blake2b(said + counter, key=KEY, digest_size=16).digest() == seal


@given(st.lists(messages, max_size=5), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(sent: list[Message], data: st.DataObject) -> None:
    sealer, (decoder, ignored) = Sealer(KEY), opened()
    stream = b"".join(encode(message, sealer=sealer) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    found: list[Message | Unknown] = []
    for a, b in itertools.pairwise([0, *cuts, len(stream)]):
        found += decoder.feed(stream[a:b])
    assert (found, ignored) == (sent, [])


@pytest.mark.parametrize("message", EACH, ids=lambda message: message.type)
def test_no_flipped_bit_gets_past_the_seal(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip each bit. The frame is not parsed then."""
    monkeypatch.setattr("aiodatadist._wire.frames._content", None)
    data = encode(message, sealer=Sealer(KEY))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        decoder, _ = opened()
        assert decoder.peek(bytes(damaged)) is None
        if bit // 8 in range(4, HEAD.size) and HEAD.unpack_from(damaged)[2] > len(data) - HEAD.size:
            damaged += bytes(MAX_BODY)  # the length: the frame ends elsewhere
        with pytest.raises(ProtocolError, match=r"wrong seal|no seal|have version|not speak|announced"):
            decoder.feed(bytes(damaged))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (encode(Bye(), sealer=Sealer(OTHER)), "wrong seal"),
        (encode(Bye()), "no seal"),
        (HEAD.pack(MAGIC, SEALED_VERSION, 0), "wrong seal"),
        (HEAD.pack(MAGIC, SEALED_VERSION, TRAILER - 1) + bytes(TRAILER - 1), "wrong seal"),
        (HEAD.pack(MAGIC, SEALED_VERSION, TRAILER) + bytes(TRAILER), "wrong seal"),
    ],
    ids=["another key", "no seal", "empty", "short", "zeros"],
)
def test_what_others_add_ends_it(frame: bytes, words: str) -> None:
    decoder, _ = opened()
    assert decoder.peek(frame) is None
    with pytest.raises(ProtocolError, match=words):
        decoder.feed(frame)
    with pytest.raises(ProtocolError):
        Decoder().feed(frame) if HEAD.unpack_from(frame)[1] != VERSION else decoder.feed(frame)


def test_a_frame_of_one_direction_is_none_of_the_other() -> None:
    decoder, _ = opened()
    with pytest.raises(ProtocolError, match="wrong seal"):
        decoder.feed(encode(Bye(), sealer=Sealer(OTHER)))


def test_a_repeated_frame_is_ignored_and_counted() -> None:
    sealer, (decoder, ignored) = Sealer(KEY), opened()
    first, second = encode(Ping(call=1), sealer=sealer), encode(Ping(call=2), sealer=sealer)
    assert decoder.feed(first + first + second + first + second) == [Ping(call=1), Ping(call=2)]
    assert len(ignored) == 3


def test_a_late_frame_is_heard_once_within_the_window() -> None:
    sealer, (decoder, ignored) = Sealer(KEY), opened()
    frames = [encode(Ping(call=1 + number), sealer=sealer) for number in range(WINDOW + 1)]
    assert decoder.feed(frames[WINDOW]) == [Ping(call=WINDOW + 1)]
    assert decoder.feed(frames[0]) == [], "too old to tell if it came before"
    assert decoder.feed(frames[1] + frames[7] + frames[1]) == [Ping(call=2), Ping(call=8)]
    assert len(ignored) == 2


def test_a_frame_that_was_only_looked_at_is_not_repeated() -> None:
    (decoder, ignored), frame = opened(), encode(Bye(), sealer=Sealer(KEY))
    assert decoder.peek(frame) == decoder.peek(frame) == Bye()
    assert decoder.feed(frame) == [Bye()]
    assert (decoder.peek(frame), ignored) == (None, [])


def test_a_frame_that_was_looked_at_and_consumed_is() -> None:
    (decoder, ignored), frame = opened(), encode(Bye(), sealer=Sealer(KEY))
    assert decoder.peek(frame) == Bye()
    decoder.consume()
    assert decoder.feed(frame) == []
    assert len(ignored) == 1


@given(st.lists(st.integers(0, 3 * WINDOW) | st.sampled_from([2**63, 2**64 - 1, 2**64 - WINDOW]), max_size=60))
def test_each_counter_is_accepted_once_and_only_within_the_window(counters: list[int]) -> None:
    opener, seen, highest = Opener(KEY), set[int](), -1
    for counter in counters:
        is_new = counter not in seen and counter > highest - WINDOW
        assert opener.accept(counter) == is_new
        if is_new:
            seen.add(counter)
            highest = max(highest, counter)


def test_counters_that_are_left_out_cost_no_memory() -> None:
    """Leave out as many counters as a peer can, so that each message costs as much as possible."""
    opener = Opener(KEY)
    tracemalloc.start()
    try:
        assert all(opener.accept(number * (WINDOW - 1)) for number in range(100))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4096
