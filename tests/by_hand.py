"""An end of a link whose frames are made and read by hand, as in the first version of the protocol.

Nothing of ``aiodatadist._wire`` or ``aiodatadist._link`` is used. Bytes move over the package's transport, which has no
versions. The end speaks version 4.0 to the letter, without checksums behind messages, and refuses each field that 4.0 did
not have. Or it is newer than this package, with fields and messages that are not known here.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import anyio
import anyio.abc

from aiodatadist import Placement
from aiodatadist._device import Device, Memory
from aiodatadist._transport import ChannelOffer, Endpoint, Region, Transport, open_transport
from tests.unit.wire.test_minor_versions import FIRST

HEAD = struct.Struct(">2sBxI")
NEWER = {"newer": [1.5, {"a": None}]}
TENSORS, BLOCKS, BLOCK = 2, 8, 4096
SECONDS = 20.0

Words = dict[str, Any]


def _seal(body: bytes) -> bytes:
    """Return the seal that each message has from 4.1 on: a mark, and a CRC-32 of two bits in each blank."""
    crc = zlib.crc32(body)
    return b"\n\r\n\r" + bytes(b" \t\n\r"[crc >> shift & 3] for shift in range(30, -2, -2))


class ByHand:
    """An end with one blocks cache.

    Attributes:
        minor: 0, or one that is newer than the package's.
        heard: all that the other end said on the link, in its order.
        notes: the payloads of its notifications.
    """

    def __init__(self, minor: int, cluster_id: int, one_sided: bool, transport: Transport, memory: Memory) -> None:
        self.minor = minor
        self.cluster_id = cluster_id
        self.one_sided = one_sided
        self.memory = memory
        self.heard: list[Words] = []
        self.notes: list[bytes] = []
        self._transport = transport
        self._stream: anyio.abc.ByteStream
        self._beats: anyio.abc.ByteStream
        self._channel: Any = None
        self._read = b""
        self._saying = anyio.Lock()
        self._news = anyio.Event()

    # ---- frames ----

    async def say(self, kind: str, **words: Any) -> None:
        async with self._saying:
            await self._say_on(self._stream, {"type": kind, **words, **(NEWER if self.minor else {})})

    async def _say_on(self, stream: anyio.abc.ByteStream, words: Words) -> None:
        body = json.dumps(words).encode()
        if self.minor:
            body += _seal(body)
        await stream.send(HEAD.pack(b"KV", 1, len(body)) + body)

    async def hear(self, kind: str) -> Words:
        """Return the next message, which must be of this kind."""
        words = await self._next()
        assert words["type"] == kind, words
        return words

    async def _next(self) -> Words:
        magic, version, length = HEAD.unpack(await self._exactly(self._stream, HEAD.size))
        assert (magic, version) == (b"KV", 1)
        words: Words = json.loads(await self._exactly(self._stream, length))
        if self.minor == 0:
            allowed = {"type", *FIRST[words["type"]].split()}
            assert set(words) <= allowed, f"version 4.0 was told {set(words) - allowed} of {words}"
        return words

    async def _exactly(self, stream: anyio.abc.ByteStream, count: int) -> bytes:
        while len(self._read) < count:
            self._read += await stream.receive()
        piece, self._read = self._read[:count], self._read[count:]
        return piece

    # ---- the beginning ----

    async def _greet(self) -> None:
        endpoint = {**asdict(self._transport.endpoint), **(NEWER if self.minor else {})}
        minor = {"minor": self.minor} if self.minor else {}  # the first version said none
        await self.say(
            "hello", protocol=4, cluster_id=self.cluster_id, role=3, instance=secrets.token_hex(32), links=0,
            nonce=secrets.token_hex(32), one_sided=self.one_sided, has_key=False, heartbeat=60, endpoint=endpoint, **minor,
        )  # fmt: skip

    async def _open_channel(self, name: str, rank: int, theirs: Words) -> None:
        mine = self._transport.endpoint
        peer = Endpoint(**theirs["endpoint"])
        ends = (mine, peer) if rank == 0 else (peer, mine)
        self._channel = await self._transport.open_channel(ChannelOffer(name, rank, ends), SECONDS)

    async def link(self, host: str, port: int) -> None:
        """Link as the client."""
        self._stream = await anyio.connect_tcp(host, port)
        await self._greet()
        theirs = await self.hear("hello")
        name = f"by-hand-{secrets.token_hex(8)}"
        await self.say("connect", channel=name, timeout=SECONDS)
        await self.hear("accept")
        await self._open_channel(name, 0, theirs)
        token = (await self.hear("ready"))["heartbeat_token"]
        self._beats = await anyio.connect_tcp(host, port)
        await self._say_on(self._beats, {"type": "attach_heartbeats", "token": token})
        await self._beats.send(b"\0")
        await self.say("ready", epoch=self._transport.epoch, heartbeat_token="0" * 64)

    async def serve(self, clients: Callable[[], Any]) -> None:
        """Serve the next client of a listener until the link ends; ``clients`` accepts one."""
        self._stream = await clients()
        theirs = await self.hear("hello")
        await self._greet()
        name = (await self.hear("connect"))["channel"]
        await self.say("accept")
        await self._open_channel(name, 1, theirs)
        token = secrets.token_hex(32)
        await self.say("ready", epoch=self._transport.epoch, heartbeat_token=token)
        self._beats = await clients()
        said, self._read = self._read, b""
        *_, length = HEAD.unpack(await self._exactly(self._beats, HEAD.size))
        attach = json.loads(await self._exactly(self._beats, length))
        assert attach == {"type": "attach_heartbeats", "token": token}
        self._read = said  # a beat that came behind it is a beat
        await self._beats.send(b"\0")
        await self.hear("ready")
        await self.react()

    # ---- on the link ----

    def entry(self) -> Words:
        """Describe the cache for a message."""
        addresses = [self.memory.address + tensor * BLOCKS * BLOCK for tensor in range(TENSORS)]
        return {
            "cache_id": 7, "blocks": True, "placement": 1, "data_type": 4, "pieces": BLOCKS, "stride": BLOCK,
            "addresses": addresses, "epoch": self._transport.epoch,
        }  # fmt: skip

    async def react(self) -> None:
        """React to messages until the other end parts, or has answered that this one does."""
        while True:
            words = await self._next()
            self.heard.append(words)
            self._news.set()
            self._news = anyio.Event()
            match words["type"]:
                case "ping":
                    await self.say("pong", call=words["call"])
                case "lookup":
                    is_there = words["name"]["kind"] == "blocks" and words["name"]["model_id"] == 0
                    await self.say("found", call=words["call"], cache=self.entry() if is_there else None, slot=0)
                case "note":
                    self.notes.append(base64.b64decode(words["payload"]))
                    await self.say("taken")
                case "revoke":
                    await self.say("revoked", cache_id=words["cache_id"])
                case "pull":  # an owner without that cache
                    await self.say("pulled", call=words["call"], status=0x5010B002, reason="there is none")
                case "disconnect":
                    await self.say("bye")
                    return
                case "bye":
                    return

    async def heard_of(self, kind: str, call: int | None = None) -> Words:
        """Wait for a message of this kind. It may have come already."""
        with anyio.fail_after(SECONDS):
            while True:
                for words in self.heard:
                    if words["type"] == kind and call in (None, words.get("call")):
                        return words
                await self._news.wait()

    async def aclose(self) -> None:
        for stream in (self._stream, self._beats):
            await anyio.aclose_forcefully(stream)
        if self._channel is not None:
            await self._channel.aclose()


@asynccontextmanager
async def by_hand(minor: int, cluster_id: int, one_sided: bool, device_id: int) -> AsyncIterator[ByHand]:
    """Open an end made by hand. Its memory is filled with the id of its cluster."""
    async with await Device.open(device_id) as device:
        nbytes = TENSORS * BLOCKS * BLOCK
        memory = device.allocate(nbytes, Placement.DEVICE)
        memory.view()[:] = bytes([cluster_id]) * nbytes
        transport = open_transport("hccl", device)
        await transport.register([Region(memory.address, nbytes, Placement.DEVICE)])
        try:
            yield ByHand(minor, cluster_id, one_sided, transport, memory)
        finally:
            await transport.aclose()
