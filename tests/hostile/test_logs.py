"""Logs: what another process says forges no line, brings in no control character, and gets no key written.

A cluster with a key is told everything hostile at DEBUG, by a stranger and by a linked peer, and an adapter's engine by its
peers. Every record is looked at, with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import anyio
import pytest

from aiodatadist import LeaseTicket, LLMClusterInfo, LLMConfig, LLMException, ParamInvalid, new_lease_name
from aiodatadist._adapters.peer_links import LinkedPeer
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.sendings import Portion
from aiodatadist._cluster import host_names
from aiodatadist._context_caching.pools.contract import PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist._link.control import wire
from aiodatadist._testing.views import call_on_loop, links_of, wire_of
from aiodatadist._values.foreign import SHOWN
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION, checked, encode, framed
from aiodatadist._wire.messages import (
    MAX_REASON,
    PROTOCOL,
    Bye,
    Disconnect,
    Hello1,
    Landed,
    Message,
    Note,
    Refuse,
    Unsupported,
)
from aiodatadist._wire.seals import Sealer
from aiodatadist.context_caching import open_pool
from aiodatadist.testing import inside, linked_pair, open_cluster
from tests.adapters.test_pushes import End
from tests.test_told_once import DESC
from tests.unit.wire.examples import EACH, hello

KEY = b"a key of 32 bytes that none sees"
LINES = "\r\nWARNING root: all is well \x1b[2J\x1b]0;owned\x07\u2028\u202e\x00"
LONG = "x" * MAX_REASON
LONGEST = SHOWN + 300
"""Characters of a line: a text of another process, and what this one says around it."""


class Log(logging.Handler):
    """Every line that would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self._lock_of_records = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        with self._lock_of_records:
            self.records.append(self.format(record))

    def check(self) -> None:
        secrets = (KEY.decode(), KEY.hex(), repr(KEY))
        for text in self.records:
            assert all(" " <= char <= "~" for char in text), f"no single printable line: {text!r}"
            assert len(text) <= LONGEST, text
            assert not any(secret in text for secret in secrets), text


@pytest.fixture
def log() -> Iterator[Log]:
    """Collect the package's log at DEBUG, and check it when the test is over."""
    made, logger = Log(), logging.getLogger("aiodatadist")
    before = logger.level
    logger.addHandler(made)
    logger.setLevel(logging.DEBUG)
    try:
        yield made
    finally:
        logger.removeHandler(made)
        logger.setLevel(before)
    made.check()


def frame(content: bytes) -> bytes:
    body = checked(content)
    return HEAD.pack(MAGIC, VERSION, len(body)) + body


def with_text(message: Message) -> Iterator[bytes]:
    """Yield a message with each of its fields, and a further one, replaced by hostile text."""
    content = json.loads(message.model_dump_json())
    for name in content:
        for text in (LINES, LINES * 20):
            yield frame(json.dumps({**content, name: text}).encode())
    yield frame(json.dumps({**content, LINES: LINES}).encode())


HELLO1 = Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["auth_key"])
STRANGERS: dict[str, Callable[[], list[bytes]]] = {
    "text": lambda: [LINES.encode()],
    "HTTP": lambda: [f"GET /{LINES} HTTP/1.1\r\n\r\n".encode()],
    "no JSON": lambda: [frame(LINES.encode())],
    "no UTF-8": lambda: [frame(b'{"type":"\xff\x1b"}')],
    "an unknown kind": lambda: [frame(json.dumps({"type": LINES}).encode())],
    "a kind that is a list": lambda: [frame(json.dumps({"type": [LINES]}).encode())],
    "a hello": lambda: list(with_text(hello(7, has_key=True))),
    "a hello, and then text": lambda: [encode(hello(7, has_key=True)) + frame(json.dumps({"type": LINES}).encode())],
    "a refusal": lambda: [encode(Refuse(status=1, reason=LONG, kind=kind)) for kind in ("", "key", "unfit")],
    "a long refusal behind a hello": lambda: [encode(hello(7, has_key=True)) + encode(Refuse(status=1, reason=LONG))],
    "each kind first": lambda: [encode(message) for message in EACH],
    "a hello1": lambda: list(with_text(HELLO1)),
    "a hello1, and then text": lambda: [encode(HELLO1) + frame(json.dumps({"type": LINES}).encode())],
    "a hello1, and then each kind": lambda: [encode(HELLO1) + encode(message) for message in EACH],
    "each kind second": lambda: [encode(hello(7, has_key=True)) + encode(message) for message in EACH],
}


async def told(port: int, data: bytes) -> None:
    """Send data until the listener closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("name", STRANGERS)
async def test_what_a_stranger_says_is_in_no_log(log: Log, name: str) -> None:
    async with open_cluster(1, auth_key=KEY) as cluster:
        address = cluster.datadist.listen_address
        assert address is not None
        for data in STRANGERS[name]():
            await told(address[1], data)
    assert log.records, "it is logged that a client was not linked"


async def test_many_strangers_are_one_line_a_second(log: Log) -> None:
    async with open_cluster(1, auth_key=KEY) as cluster:
        address = cluster.datadist.listen_address
        assert address is not None
        incidents, now = inside(cluster.datadist).totals.incidents, 0.0
        incidents.clock = lambda: now
        for _ in range(50):
            await told(address[1], frame(b"{}"))
        now = 1.0
        await told(address[1], frame(b"{}"))
    lines = [text for text in log.records if "a client was not linked" in text]
    assert len(lines) == 2
    assert lines[1].endswith("(and 49 more)")
    assert cluster.datadist.figures().incidents == {"client_refused": 51}


PEERS: dict[str, Message | bytes] = {
    "a long reason to unlink": Disconnect(reason="x" * 512),
    "a long refusal": Refuse(status=1, reason=LONG),
    "a long failure of layers": Landed(cache_id=1, first=0, stop=1, status=1, reason=LONG),
    "a kind that it does not know": Unsupported(kind="k" * 32),
    "a note": Note(payload="AAAA", number=1),
    "no JSON": LINES.encode(),
    "an unknown kind": json.dumps({"type": LINES}).encode(),
    "text in a reason": json.dumps({"type": "disconnect", "reason": LINES}).encode(),
    "an unknown field": json.dumps({"type": "bye", LINES: LINES}).encode(),
}


@pytest.mark.parametrize("name", PEERS)
async def test_what_a_linked_peer_says_is_printable_and_short(
    log: Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC, auth_key=KEY) as (prompt, decoder, _, _):
        mine = inside(prompt.datadist).links.peek(2)
        other = inside(decoder.datadist).links.peek(1)
        assert mine is not None
        assert other is not None
        said = PEERS[name]
        content = said if isinstance(said, bytes) else said.model_dump_json().encode()
        with monkeypatch.context() as context:
            context.setattr(wire, "encode", lambda _, __, sealer: framed(content, sealer))
            await wire_of(mine).send(Bye())
        await wire_of(mine).send(Disconnect(reason="that was all"))
        await other.wait_closed()


@pytest.mark.parametrize("name", ["no frame", "no seal", "another seal"])
async def test_what_others_add_to_a_link_is_in_no_log(log: Log, name: str) -> None:
    added = {
        "no frame": LINES.encode(),
        "no seal": frame(LINES.encode()),
        "another seal": framed(LINES.encode(), Sealer(b"another")),
    }
    async with linked_pair(DESC, auth_key=KEY) as (prompt, decoder, _, _):
        mine = inside(prompt.datadist).links.peek(2)
        other = inside(decoder.datadist).links.peek(1)
        assert mine is not None
        assert other is not None
        await wire_of(mine).stream.send(added[name])
        await other.wait_closed()


async def test_what_a_name_service_says_is_printable(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_FAIL, LINES * 100)

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    async with open_cluster(1) as cluster:
        info = LLMClusterInfo(2)
        info.append_remote_ip_info("a.name", 1)
        results = await cluster.datadist.link_clusters([info], 5000)
    assert results.errors[0] is not None
    assert all(" " <= char <= "~" for char in str(results.errors[0]))


@pytest.mark.parametrize("reply", [b"-ERR ", b"-NOAUTH ", b"-MOVED 1 ", b"$", b"*", b"", b"-LOADING "], ids=repr)
async def test_what_a_pools_server_says_is_printable(log: Log, reply: bytes) -> None:
    pytest.importorskip("redis")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(reply + LINES.replace("\r\n", " ").encode() * 20 + b"\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((PoolUnreachable, PoolTimeout)) as refused:
            await asked(f"redis://127.0.0.1:{port}")
    assert all(" " <= char <= "~" for char in str(refused.value)), str(refused.value)
    assert len(str(refused.value)) <= LONGEST


async def asked(url: str) -> None:
    """Ask a pool. Raises what a context cache raises if the pool cannot be opened, or does not answer."""
    pool = await open_pool(url)
    try:
        await pool.exists_many([PoolKey("space", "node", "key")], deadline=anyio.current_time() + 5)
    finally:
        await pool.aclose()


# ---- an adapter's engine ----


def test_what_a_peer_of_an_engine_says_is_printable(log: Log) -> None:
    """Notes that are no messages, and messages with hostile names, layouts and reasons."""
    prefill, decode = End(0), End(1)
    with closing(prefill.service), closing(decode.service):
        words = {
            "kind": "want", "transfer": LINES[:40], "first": 0, "into": [0], "count": 1, "caches": 0,
            "layout": {LINES[:40]: LINES[:40]},
        }  # fmt: skip
        notes = [
            LINES.encode(),
            b"\xff\x1b",
            json.dumps({"kind": LINES}).encode(),
            json.dumps({**words, LINES: 1}).encode(),
            json.dumps({**words, "layout": {LINES * 9: 1}}).encode(),
            json.dumps({**words, "into": [LINES]}).encode(),
            json.dumps(words).encode(),
            json.dumps({"kind": "drop", "transfer": LINES[:40]}).encode(),
        ]
        prefill.service.push(LINES[:40], Portion(0, (3,), None))
        prefill.service.pushed(LINES[:40], f"request {LINES}")
        say(decode, prefill, notes)
        prefill.sent(f"request {LINES}")
        order = ExpectOrder(f"request {LINES}", prefill.address, "wanted", 0, (1,))
        decode.service.expect(order)
        prefill.until(lambda ended: "wanted" in ended.wanted)
        say(
            prefill,
            decode,
            [json.dumps({"kind": "refused", "transfer": "wanted", "number": 1, "reason": LINES * 30}).encode()],
        )
        decode.received(f"request {LINES}")
    assert any("an unreadable message" in text for text in log.records)
    assert any("its blocks do not come" in text for text in log.records)


def say(sender: End, receiver: End, notes: list[bytes]) -> None:
    """Send notifications over the link of the two, which is made if there is none."""

    async def post() -> None:
        cluster_id = receiver.address.cluster_id
        link = inside(sender.service).links.peek(cluster_id)
        peer = (
            LinkedPeer(cluster_id, link.generation)
            if link is not None
            else await links_of(sender.service).link(receiver.address, "")
        )
        for note in notes:
            await links_of(sender.service).current(peer).session.notify(note)

    call_on_loop(sender.service, post)


@pytest.mark.parametrize(
    "change",
    [{"lease": LINES}, {"blocks": [LINES]}, {LINES: 1}, {"cluster_id": LINES}, {"seconds": LINES}],
    ids=["name", "blocks", "field", "cluster", "seconds"],
)
def test_what_is_wrong_with_a_ticket_is_printable(change: dict[str, Any]) -> None:
    ticket = {"cluster_id": 1, "lease": new_lease_name(), "cache_id": 1, "blocks": [1], "seconds": 1.0}
    with pytest.raises(ParamInvalid) as refused:
        LeaseTicket.of({**ticket, **change})
    assert all(" " <= char <= "~" for char in str(refused.value))
    assert len(str(refused.value)) <= LONGEST


def test_a_configuration_and_its_errors_show_no_key() -> None:
    assert KEY.decode() not in repr(LLMConfig(listen="127.0.0.1:0", auth_key=KEY))
    with pytest.raises(LLMException) as refused:
        LLMConfig(listen="10.0.0.1:1", auth_key=KEY, heartbeat_interval=-1)
    assert KEY.decode() not in str(refused.value)
