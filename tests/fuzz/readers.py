"""The readers of input from others, what each may raise, and what must hold for whatever it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic_core import from_json

from aiodatadist import LeaseTicket, ParamInvalid
from aiodatadist._adapters import push_messages, rendezvous_lines
from aiodatadist._adapters.hold_messages import Held, Hold, LetGo
from aiodatadist._adapters.peers import LOOPBACK, Peers
from aiodatadist._adapters.vllm.offer import MAX_OFFER, MAX_OFFER_TEXT, Offer, Offers, PushOffer
from aiodatadist._cluster.rank_groups import MAX_CARD, Card
from aiodatadist._config.certificate_names import uri_id
from aiodatadist._config.policy import MAX_NAME, Policy
from aiodatadist._config.secret_files import MAX_FILE
from aiodatadist._config.trust import keys_of
from aiodatadist._context_caching.pools.contract import PoolKey
from aiodatadist._context_caching.pools.redis.nodes import parse_nodes
from aiodatadist._context_caching.pools.redis.resp import Exchange, NotRedis, request
from aiodatadist._context_caching.transfer.envelope import Envelope
from aiodatadist._values.foreign import Unreadable, printable, read_foreign
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION, Decoder, Unknown, checked, encode
from aiodatadist._wire.messages import MINOR, Message
from aiodatadist.errors import IncompatiblePeer, ProtocolError
from tests.unit.wire.examples import EACH, hello

CORPUS = Path(__file__).parent / "corpus"
LONGEST_REFUSAL = 1000
"""Characters of a refusal: it may end up in a log."""


@dataclass(frozen=True)
class Reader:
    """A reader of input from others.

    Attributes:
        read: reads bytes, and asserts what must hold for what it has read.
        refusals: the errors with which it may refuse them.
        examples: inputs that it accepts.
    """

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    examples: Callable[[], Sequence[bytes]]

    def check(self, data: bytes) -> None:
        """Read bytes. Raises what the reader must not raise, and AssertionError if a refusal is not one short line."""
        try:
            self.read(data)
        except self.refusals as error:
            words = str(error)
            assert len(words) <= LONGEST_REFUSAL, words
            assert words.isascii(), words
            assert words.isprintable(), words


def _known(message: Message | Unknown) -> bytes:
    """Return a message's bytes. They must be read as the same message."""
    if isinstance(message, Unknown):
        return b""
    data = encode(message)
    decoder = Decoder()
    decoder.minor = MINOR
    (again,) = decoder.feed(data)
    assert again == message
    return data


def read_stream(data: bytes) -> None:
    """Read frames, whole and in two pieces: both must give the same messages, or both an error."""
    ends: list[tuple[list[Message | Unknown], str]] = []
    for cut in (len(data), len(data) // 2):
        decoder, heard, why = Decoder(1 << 14), list[Message | Unknown](), ""
        try:
            for piece in (data[:cut], data[cut:], b""):
                heard += decoder.feed(piece)
        except (ProtocolError, IncompatiblePeer) as error:
            why = str(error)
        ends.append((heard, why))
    (messages, failed), (cut_messages, cut_failed) = ends
    assert messages == cut_messages
    assert bool(failed) is bool(cut_failed), "the words may name as many bytes as have come"
    for message in messages:
        _known(message)
    if failed:
        raise ProtocolError(failed)


def read_body(data: bytes) -> None:
    """Read the content of one frame, with a checksum that is right, from a peer of this version and of a newer one."""
    body = checked(data)
    for minor in (MINOR, MINOR + 1):
        decoder = Decoder()
        decoder.minor = minor
        try:
            messages = decoder.feed(HEAD.pack(MAGIC, VERSION, len(body)) + body)
        except (ProtocolError, IncompatiblePeer):
            if minor > MINOR:
                raise
            continue
        for message in messages:
            _known(message)


def read_offer(data: bytes) -> None:
    """Read a router's parameters."""
    params = _json(data)
    if isinstance(params, dict):
        offers = Offers(2, Peers(LOOPBACK), 64, 16)
        offers.offer_of("request", dict(params), 4096)
        offers.transfer_to_push(dict(params))
        kind = PushOffer if "transfer_id" in params else Offer
        read_foreign(params, kind, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)


def read_ticket(data: bytes) -> None:
    """Read a ticket, which must be the same once it was written and read again."""
    content = _json(data)
    if isinstance(content, dict):
        ticket = LeaseTicket.of(content)
        assert LeaseTicket.of(ticket.model_dump()) == ticket


_HELD = Held(lease="a" * 32, blocks="0" * 32, prompt="1" * 32, holder=7, share=2)


def read_push(data: bytes) -> None:
    """Read a message about a push, which must be the same once it was written and read again."""
    message = push_messages.decode(data)
    assert push_messages.decode(push_messages.encode(message)) == message


def read_line(data: bytes) -> None:
    """Read a line of a bootstrap server, or of one of its clients."""
    if not data.startswith(b"{"):
        rendezvous_lines.opened((b"k" * 32,), data)
    try:
        rendezvous_lines.parsed(data, rendezvous_lines.QUESTION, rendezvous_lines.MAX_QUESTION)
    except Unreadable:
        rendezvous_lines.parsed(data, rendezvous_lines.ANSWER, rendezvous_lines.MAX_QUESTION)


def read_keys(data: bytes) -> None:
    """Read a file of keys. No refusal may show a secret."""
    for key in keys_of(data, Path("keys")):
        assert len(key.secret) >= 32


def read_nodes(data: bytes) -> None:
    """Read what a Redis server says of its cluster. Its reader catches these errors, and makes one line of them."""
    try:
        view = parse_nodes(data.decode(), "127.0.0.1")
    except (IndexError, ValueError) as error:
        raise NotRedis(printable(error)) from None
    assert len(view.owners) == 16384


class _Dropped:
    """A transport that goes nowhere."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def write(self, data: object) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool:
        return False


def read_replies(data: bytes) -> None:
    """Read the replies of a Redis server to four commands."""

    async def run() -> None:
        exchange = Exchange()
        exchange.connection_made(cast("asyncio.Transport", _Dropped()))
        into = memoryview(bytearray(18))
        asked = [request("GET", "a", into=into), request("SET", "a", 1), request("GET", "b"), request("INFO")]
        task = asyncio.create_task(exchange.ask(asked))
        await asyncio.sleep(0)
        rest = memoryview(data)
        while rest and not exchange.is_lost:
            room = exchange.get_buffer(-1)
            taken = min(len(room), len(rest))
            assert taken
            room[:taken], rest = rest[:taken], rest[taken:]
            exchange.buffer_updated(taken)
            if task.done():
                break
            await asyncio.sleep(0)
        exchange.connection_lost(None)
        try:
            replies = await task
            assert len(replies) == len(asked)
        except ConnectionError as error:
            raise NotRedis(str(error)) from None

    asyncio.run(run())


class _Bytes:
    """A value of a pool."""

    address = 0

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = len(data)

    def view(self) -> memoryview:
        return memoryview(self.data)

    def release(self) -> None: ...


def read_value(data: bytes) -> None:
    """Look at the header of a value."""
    envelope = Envelope()
    try:
        value = cast("Any", _Bytes(data.ljust(envelope.nbytes, b"\0")))
        assert asyncio.run(envelope.proven([PoolKey("a", "b", "c")], [value])) in ([True], [False])
    finally:
        envelope.close()


def _json(data: bytes) -> object:
    try:
        return from_json(data)
    except ValueError:
        return None


def _dumped(*contents: object) -> list[bytes]:
    return [json.dumps(content).encode() for content in contents]


def _model(kind: Any, limit: int, chars: int) -> Callable[[bytes], object]:
    return lambda data: read_foreign(data, kind, limit_bytes=limit, limit_chars=chars)


_OFFER = {
    "do_remote_prefill": True, "remote_request_id": "r", "remote_block_ids": [1, 2], "remote_num_tokens": 20,
    "remote_block_size": 16, "lease": "0" * 32, "lease_seconds": 60.0, "workers": [
        {"cluster_id": 1, "host": "127.0.0.1", "port": 26000, "cache_ids": [1], "layout": {"engine": "a"}, "memory": {
            "planes": [{"group": 0, "stride": 4096, "tensors": 4}], "regions": [
                {"template": "layers.*.attn", "numbers": "0-3", "tensor": 0, "tensor_step": 1, "tokens": 16,
                 "heads": [0, 2, 8], "axes": [["tokens", 16, 256], ["heads", 2, 128], ["part", 64, 2]], "itemsize": 2,
                 "dtype": "bfloat16"}]}}],
}  # fmt: skip
_PUSHED = {
    "do_remote_prefill": True, "transfer_id": "t" * 20,
    "prefill": {"cluster_id": 1, "host": "127.0.0.1", "port": 26000},
}  # fmt: skip
_TICKET = {"cluster_id": 7, "lease": "0123456789abcdef" * 2, "cache_id": 3, "blocks": [1, 2, 9], "seconds": 30.0}
_POLICY = {
    "version": 1, "clusters": [{"match": {"key": "decode"}, "ids": "1000-1999, 7", "may": ["link", "read"]}],
    "otherwise": [],
}  # fmt: skip
_NODES = (
    b"07c37dfeb235213a872192d90877d0cd55635b91 127.0.0.1:30004@31004,hostname4 slave e7d1 0 1426238317239 4 connected\n"
    b"67ed2db8d677e59ec4a4cefb06858cf2a1a89fa1 127.0.0.1:30002@31002 master - 0 1426238316232 2 connected 5461-10922\n"
    b"e7d1eecce10fd6bb5eb35b9f99a514335d9ba9ca 127.0.0.1:30001@31001 myself,master - 0 0 1 connected 0-5460 [93-<-292f]\n"
)

READERS = {
    "frames": Reader(
        read_stream,
        (ProtocolError, IncompatiblePeer),
        lambda: [encode(hello(1, has_key=True, minor=MINOR)) + encode(each) for each in EACH[:4]] + [encode(EACH[0])],
    ),
    "messages": Reader(
        read_body, (ProtocolError, IncompatiblePeer), lambda: [each.model_dump_json().encode() for each in EACH]
    ),
    "offers": Reader(read_offer, (Unreadable, ParamInvalid), lambda: _dumped(_OFFER, _PUSHED)),
    "tickets": Reader(read_ticket, (ParamInvalid, TypeError), lambda: _dumped(_TICKET)),
    "pushes": Reader(
        read_push,
        (Unreadable,),
        lambda: [
            push_messages.encode(push_messages.Sent(transfer="t" * 20, number=1)),
            push_messages.encode(push_messages.Refused(transfer="t" * 20, number=1, reason="no")),
            push_messages.encode(push_messages.More(transfer="t" * 20, number=1, into=(1, 2))),
            push_messages.encode(Hold(held=(_HELD,))),
            push_messages.encode(LetGo(held=(_HELD, _HELD))),
        ],
    ),
    "bootstrap": Reader(
        read_line,
        (Unreadable, rendezvous_lines.Unsealed),
        lambda: _dumped(
            {"type": "ask", "at": 1.5, "nonce": "0" * 32},
            {"type": "greet", "at": 1.5, "nonce": "0" * 32},
            {"type": "ranks", "layout": {"a": 1}, "addresses": [{"cluster_id": 1, "host": "127.0.0.1", "port": 1}]},
            {"type": "refused", "reason": "no"},
        ),
    ),
    "cards": Reader(_model(Card, MAX_CARD, MAX_CARD), (Unreadable,), lambda: _dumped(
            {"cluster_id": 1, "host": "127.0.0.1", "port": 1, "secret": "0" * 64}
        )),
    "policies": Reader(_model(Policy, MAX_FILE, MAX_NAME), (Unreadable,), lambda: _dumped(_POLICY)),
    "keys": Reader(read_keys, (ParamInvalid,), lambda: [b"# first\na " + b"ab" * 32 + b"\nb " + b"cd" * 40 + b"\n"]),
    "names": Reader(
        lambda data: uri_id(data.decode("utf-8", "replace")),
        (),
        lambda: [b"spiffe://prod/kv/cluster/7", b"aiodatadist://cluster/18446744073709551615"],
    ),
    "nodes": Reader(read_nodes, (NotRedis,), lambda: [_NODES]),
    "replies": Reader(
        read_replies,
        (NotRedis,),
        lambda: [b"$16\r\n0123456789abcdef\r\n+OK\r\n$-1\r\n$4\r\nabcd\r\n", b"-ERR no\r\n:7\r\n$0\r\n\r\n$-1\r\n"],
    ),
    "values": Reader(read_value, (), lambda: [b"addvalue" + bytes(56) + b"payload"]),
}  # fmt: skip
"""By name."""
