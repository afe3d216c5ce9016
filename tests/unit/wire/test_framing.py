"""Any bytes are messages or a ProtocolError, whole and byte by byte."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiodatadist import IncompatiblePeer, LinkError, ProtocolError
from aiodatadist._values.foreign import SHOWN
from aiodatadist._wire.frames import (
    HEAD,
    MAGIC,
    MAX_BODY,
    MAX_NEWER,
    TLS_VERSION,
    VERSION,
    Decoder,
    Unknown,
    checked,
    encode,
)
from aiodatadist._wire.messages import (
    MAX_INDEXES,
    MAX_NOTE,
    MAX_TENSORS,
    MINOR,
    PLAIN_PROTOCOL,
    PROTOCOL,
    SEALED_MINOR,
    Bye,
    Digests,
    Disconnect,
    Found,
    Hello,
    Message,
    Note,
)
from aiodatadist._wire.seals import ByTls, Sealer
from tests.unit.wire.examples import EACH, digest, entry, hello, messages, pull

HELLO = encode(hello(1))


def frame(content: bytes) -> bytes:
    return framed(checked(content))


def framed(body: bytes) -> bytes:
    return HEAD.pack(MAGIC, VERSION, len(body)) + body


def met(minor: int) -> Decoder:
    """Return a decoder whose peer has said that it is of this minor version."""
    decoder = Decoder()
    decoder.meet(hello(1, minor=minor))
    return decoder


def read(pieces: list[bytes], decoder: Decoder | None = None) -> tuple[list[Message | Unknown], LinkError | None]:
    """Decode the pieces. Return the messages, and the error if the decoder had enough."""
    decoder, found = decoder or Decoder(), list[Message | Unknown]()
    for piece in [*pieces, b""]:  # an error behind a message is raised next time
        try:
            found += decoder.feed(piece)
        except (ProtocolError, IncompatiblePeer) as error:
            return found, error
    return found, None


@st.composite
def damaged_frames(draw: st.DrawFn) -> bytes:
    data = bytearray(encode(draw(messages)))
    at = draw(st.integers(0, len(data) - 1))
    data[at] = draw(st.integers(0, 255))
    return bytes(data)


anything = st.lists(
    st.binary(max_size=32) | st.binary(max_size=200).map(frame) | messages.map(encode) | damaged_frames(), max_size=4
).map(b"".join)


@given(anything)
@example(b"")
@example(b"K")
@example(b"KX")
@example(frame(b""))
@example(frame(b'{"type":"bye"'))
@example(frame(b'{"type":"bye","type":"bye"}'))
@example(frame(b"[" * 100_000))
@example(frame(b'{"type":' * 10_000))
@example(frame(b"\xff\xfe"))
@example(frame(b'{"type":"disconnect","reason":"\\ud800"}'))
@example(frame(b'{"type":"welcome","nonce":NaN}'))
@example(frame(b'{"type":"refuse","reason":"","status":' + b"9" * 10_000 + b"}"))
def test_any_bytes_are_messages_or_a_protocol_error(data: bytes) -> None:
    whole, error = read([data])
    single, same_error = read([data[i : i + 1] for i in range(len(data))])
    assert (error is None) == (same_error is None)
    assert whole == single


@given(st.lists(messages, max_size=5), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == (sent, None)


@given(anything)
def test_decoder_never_holds_more_than_one_frame(data: bytes) -> None:
    decoder = Decoder(max_body=64)
    try:
        for i in range(len(data)):
            decoder.feed(data[i : i + 1])
            assert len(decoder._buffer) < HEAD.size + 64
    except ProtocolError:
        assert len(decoder._buffer) <= HEAD.size + 64


@pytest.mark.parametrize("length", [MAX_BODY + 1, 2**31, 2**32 - 1])
def test_nothing_is_allocated_for_a_length_beyond_the_limit(length: int) -> None:
    decoder, head = Decoder(), HEAD.pack(MAGIC, VERSION, length)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"announced a message of {length} bytes: the limit is {MAX_BODY}"):
            decoder.feed(head)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_nothing_is_allocated_for_a_length_within_the_limit_before_its_bytes_come() -> None:
    decoder, head = Decoder(), HEAD.pack(MAGIC, VERSION, MAX_BODY)
    tracemalloc.start()
    try:
        assert decoder.feed(head) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_limit_is_inclusive() -> None:
    body = encode(Bye())[HEAD.size :]
    assert Decoder(max_body=len(body)).feed(framed(body)) == [Bye()]
    with pytest.raises(ProtocolError, match="the limit is"):
        Decoder(max_body=len(body) - 1).feed(framed(body))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak our protocol: it begins with b'GE'"),
        (b"G", "does not speak our protocol"),
        (b"KX", "does not speak our protocol"),
        (HEAD.pack(MAGIC, 2, 0), "a sealed message before there was a key for it"),
        (HEAD.pack(MAGIC, 3, 0), "the peer's frames have version 3, ours 1"),
        (frame(b""), "is not valid"),
        (frame(b"null"), "is not valid"),
        (frame(b"{}"), "is not valid"),
        (frame(b'{"type":"nonsense"}'), "is not valid"),
        (frame(b'{"type":"bye","more":1}'), "is not valid: bye.more: Extra inputs are not permitted"),
    ],
)
def test_refusal_says_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Decoder().feed(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"' + b"x" * 100_000 + b'"}',
        b'{"type":"bye","' + b"x" * 100_000 + b'":1}',
        b'{"type":"bye","line\\nbreak \\u001b[31m":1}',
        b'{"type":"' + "ü\U0001f600".encode() * 1000 + b'"}',
    ],
)
def test_complaint_is_one_short_printable_line_whatever_the_peer_says(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        Decoder().feed(frame(body))
    text = str(caught.value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < SHOWN + 100


def test_message_larger_than_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=rf"a 'pull' message has \d+ bytes: the limit is {MAX_BODY}"):
        encode(pull(src_blocks=[2**63] * MAX_INDEXES))


@pytest.mark.parametrize(
    "message",
    [
        Note(payload="A" * ((MAX_NOTE + 2) // 3 * 4)),
        Found(call=2**63 - 1, cache=entry(addresses=[2**63] * MAX_TENSORS)),
        pull(src_blocks=[10**9 - 1] * (MAX_INDEXES - 50), dst_blocks=[10**9 - 1] * (MAX_INDEXES - 50)),
    ],
    ids=lambda message: message.type,
)
def test_the_largest_that_we_have_to_say_fits_a_frame(message: Message) -> None:
    assert Decoder().feed(encode(message)) == [message]


def newer() -> Decoder:
    """Return a decoder that heard a hello of the next minor version."""
    decoder = Decoder()
    assert decoder.feed(encode(hello(1, minor=MINOR + 1))) == [hello(1, minor=MINOR + 1)]
    return decoder


def with_more(message: Message, count: int = 1, deep: str = "") -> bytes:
    content = json.loads(encode(message)[HEAD.size :])
    (content[deep] if deep else content).update({f"more {i}": [i, {"a": None}] for i in range(count)})
    return frame(json.dumps(content).encode())


@pytest.mark.parametrize("message", [each for each in EACH if not isinstance(each, Hello)], ids=lambda each: each.type)
def test_fields_that_a_newer_minor_version_adds_are_ignored(message: Message) -> None:
    assert newer().feed(with_more(message)) == [message]
    with pytest.raises(ProtocolError, match="Extra inputs are not permitted"):
        Decoder().feed(with_more(message))


def test_they_are_ignored_however_deep_they_are_and_in_large_messages() -> None:
    large = pull(src_blocks=list(range(5000)), dst_blocks=list(range(5000)))
    for message, deep in ((Found(call=1, cache=entry()), "cache"), (large, "name"), (large, "")):
        assert newer().feed(with_more(message, deep=deep)) == [message]


def test_they_are_so_many_at_most() -> None:
    assert newer().feed(with_more(Bye(), MAX_NEWER)) == [Bye()]
    with pytest.raises(ProtocolError, match="Extra inputs are not permitted"):
        newer().feed(with_more(Bye(), MAX_NEWER + 1))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "disconnect", "reason": 5, "more": 1},
        {"type": "disconnect", "more": 1},
        {"type": 5},
        {"type": None, "optional": True},
        {"type": "x" * 33, "optional": True},
        {"optional": True},
        [],
    ],
)
def test_a_newer_version_does_not_excuse_what_is_wrong(content: object) -> None:
    with pytest.raises(ProtocolError, match="is not valid"):
        newer().feed(frame(json.dumps(content).encode()))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"type": "gossip", "optional": True, "call": 5}, []),
        ({"type": "inquire", "call": 5, "what": {}}, [Unknown("inquire", 5)]),
        ({"type": "inform"}, [Unknown("inform", 0)]),
        ({"type": "inform", "optional": 1, "call": -1}, [Unknown("inform", 0)]),
        ({"type": "x\n" * 16, "call": 2**63}, [Unknown("x\\n" * 9 + "x\\...", 0)]),
    ],
)
def test_a_message_of_a_newer_version_is_ignored_where_it_may_be_and_else_told(
    content: dict[str, object], found: list[object]
) -> None:
    decoder = newer()
    assert decoder.feed(frame(json.dumps(content).encode()) + encode(Bye())) == [*found, Bye()]
    with pytest.raises(ProtocolError, match="is not valid"):
        Decoder().feed(frame(json.dumps(content).encode()))


@pytest.mark.parametrize("others", [{}, {"who": 1}, {"role": "none"}])
def test_a_hello_of_another_major_version_is_told_by_its_version_whatever_else_is_in_it(
    others: dict[str, object],
) -> None:
    content = {"type": "hello", "protocol": PLAIN_PROTOCOL + 1, "minor": 2, **others}
    words = rf"protocol differs: {PLAIN_PROTOCOL}\.{MINOR} here, {PLAIN_PROTOCOL + 1}\.2 at the peer"
    with pytest.raises(IncompatiblePeer, match=words):
        Decoder().feed(frame(json.dumps(content).encode()))


def test_messages_before_a_damaged_one_are_read_when_they_come_alone() -> None:
    decoder = Decoder()
    assert decoder.feed(HELLO + encode(Disconnect(reason="x"))[:-1]) == [hello(1)]
    with pytest.raises(ProtocolError):
        decoder.feed(b"]")


def test_reading_no_more_than_is_wanted_ends_with_the_message() -> None:
    decoder, data = Decoder(), encode(Bye()) + HELLO + encode(Bye())
    for message in (Bye(), hello(1), Bye()):
        found: list[Message | Unknown] = []
        while not found:
            wanted, data = data[: decoder.wanting], data[decoder.wanting :]
            found = decoder.feed(wanted)
        assert found == [message]
    assert data == b""


def test_as_many_checksums_as_blocks_fit_a_frame() -> None:
    message = Digests(call=2**63 - 1, status=0, checksums=[2**32 - 1] * MAX_INDEXES)
    assert Decoder().feed(encode(message)) == [message]
    question = digest(indexes=list(range(10**8, 10**8 + MAX_INDEXES)))
    assert Decoder().feed(encode(question)) == [question]


@pytest.mark.parametrize("message", EACH, ids=lambda message: message.type)
def test_no_flipped_bit_makes_another_message(message: Message) -> None:
    """Flip each bit: a changed digit would be the number of another block.

    The mark is no exception, behind which a further bit would not be noticed.
    """
    data = encode(message)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        found, error = read([bytes(damaged)], met(MINOR))
        is_read_nowhere, at_the_length = bit // 8 == 3, bit // 8 in range(4, HEAD.size)
        assert found == ([message] if is_read_nowhere else []), bit
        assert error is not None or is_read_nowhere or at_the_length, bit


def test_a_message_that_lacks_bytes_is_noticed_with_the_next_one() -> None:
    data = bytearray(encode(Bye()))
    data[7] += 16
    decoder = Decoder()
    assert decoder.feed(bytes(data)) == []
    with pytest.raises(ProtocolError, match=r"checksum|speak|valid"):
        decoder.feed(encode(Bye()) * 2)


def test_an_end_that_knows_no_checksum_reads_blanks() -> None:
    body = encode(Bye())[HEAD.size :]
    assert body.strip() == b'{"type":"bye"}'


def test_only_the_first_version_says_messages_without_checksums() -> None:
    bare = framed(b'{"type":"bye"}')
    assert Decoder().feed(bare) == met(0).feed(bare) == [Bye()]
    for decoder in (met(1), met(MINOR + 1)):
        with pytest.raises(ProtocolError, match="it has no checksum"):
            decoder.feed(bare)
    assert met(1).peek(bare) is None
    for blank in b" \t\n\r":  # a damaged mark, and a damaged hello that says that there are none
        with pytest.raises(ProtocolError, match="it has no checksum"):
            met(0).feed(framed(b'{"type":"bye"}' + bytes([blank])))
    first = framed(encode(hello(1, minor=1))[HEAD.size : -8])
    with pytest.raises(ProtocolError, match="it has no checksum"):
        Decoder().feed(first)


def test_a_message_over_tls_ends_with_its_json_and_comes_in_no_other_frame() -> None:
    sealed = encode(Bye(), MINOR, ByTls.SEALED)
    assert sealed == HEAD.pack(MAGIC, TLS_VERSION, 14) + b'{"type":"bye"}'
    decoder = over_tls()
    assert decoder.peek(sealed) == Bye()
    decoder.consume()
    assert decoder.feed(sealed * 2) == [Bye(), Bye()]
    for version, other in ((1, encode(Bye())), (2, encode(Bye(), MINOR, Sealer(bytes(32))))):
        assert over_tls().peek(other) is None
        with pytest.raises(ProtocolError, match=f"the peer's frames have version {version}, ours 3"):
            over_tls().feed(other)
    assert Decoder().peek(sealed) is None
    with pytest.raises(ProtocolError, match="the peer's frames have version 3, ours 1"):
        Decoder().feed(sealed)
    with pytest.raises(ProtocolError, match="not valid"):
        over_tls().feed(sealed[:-1] + b"]")


def over_tls() -> Decoder:
    decoder = Decoder(protocol=PROTOCOL)
    decoder.minor = SEALED_MINOR
    decoder.open_with(ByTls.SEALED)
    return decoder
