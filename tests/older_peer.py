"""A cluster of version 4.0 of the protocol, in a process of its own, which refuses all that is newer.

Arguments: whether transfers are one-sided (1 or 0); and, for one that links to cluster 2, that one's port. Without it
prints its own. It ends with its standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import anyio
import anyio.to_thread

from aiodatadist import LLMClusterInfo
from aiodatadist._cluster.engine import Engine
from aiodatadist._link.control import wire
from aiodatadist._link.transfers import pull_requests
from aiodatadist._wire import frames
from aiodatadist._wire.frames import HEAD, Unknown, encode
from aiodatadist._wire.messages import Hello, Message
from aiodatadist.errors import ProtocolError
from aiodatadist.testing import open_cluster
from tests.test_older_versions import link, mode, part, use
from tests.test_versions import DESC
from tests.unit.wire.test_minor_versions import OLD


def speak_older(patch: Callable[[object, str, object], None]) -> None:
    """Let each end in this process be of version 4.0 from here on."""
    own, parse = Engine.hello, frames._parse

    def made(self: Engine, has_key: bool, peer: int | None) -> Hello:
        return own(self, has_key, peer).model_copy(update={"minor": 0})

    def parsed(body: bytes, _: int | None, protocol: int) -> Message | Unknown | None:
        message = parse(body, 0, protocol)
        if message is None or message.type not in OLD:
            raise ProtocolError(f"an end of version 4.0 was told {body[:100]!r}")
        try:
            OLD[message.type].model_validate_json(body)
        except ValueError as error:
            if not isinstance(message, Hello):  # it may have more from a newer one
                raise ProtocolError(f"an end of version 4.0 was told {body[:1000]!r}: {error}") from error
        return message

    def said(message: Message, _: int = 0, __: None = None) -> bytes:
        frame = encode(message, 0)
        OLD[message.type].model_validate_json(frame[HEAD.size :])
        return frame

    patch(Engine, "hello", made)
    patch(frames, "_parse", parsed)
    patch(wire, "encode", said)
    patch(pull_requests, "MOST_BLOCKS", 0)  # it says one request in a message, to whatever peer


async def main(one_sided: int, port: int = 0) -> None:
    async with open_cluster(1, **mode(bool(one_sided))) as cluster:
        cache = await cluster.blocks(DESC)
        if port:
            peer = LLMClusterInfo(2)
            peer.append_remote_ip_info("127.0.0.1", port)
            await link(cluster, peer)
            await use(cluster, 2, cache, bool(one_sided))
            print("linked", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            await part(cluster, peer)
            return
        address = cluster.datadist.listen_address
        print(address[1] if address else 0, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    speak_older(setattr)
    anyio.run(lambda: main(*(int(argument) for argument in sys.argv[1:])))
