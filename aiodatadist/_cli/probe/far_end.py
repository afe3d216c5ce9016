"""The far end of a step: a process on the other device that lends memory and follows the near end's requests.

It accesses only its own memory, by names, and makes only the calls below.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiodatadist._cli.probe.bench import Bench, Memory, pattern
from aiodatadist._cli.probe.channel import Channel, Registered, init_communicator
from aiodatadist._cli.probe.endpoint import endpoint_of
from aiodatadist._cli.probe.lines import Lines

if TYPE_CHECKING:
    from aiodatadist._transport.contract import Endpoint

MOST_LENT = 256 << 20
"""The most bytes of one range, and so the largest ``--mib``."""

MOST_READ = 64 << 10
RANK = 1


def serve_near(bench: Bench, link: socket.socket) -> None:
    """Serve the near end until it closes the connection."""
    lines = Lines(link)
    try:
        bench.open()
        mine = endpoint_of(bench)
    except Exception as error:
        lines.send(error=str(error))
        return
    lines.send(endpoint=dataclasses.asdict(mine))
    far = FarEnd(bench, mine)
    while True:
        try:
            order = lines.receive()
        except ConnectionError:
            return
        try:
            answer = far.do(order)
        except Exception as error:  # told to the near end, which stops the step
            answer = {"error": str(error)}
        lines.send(**answer)


class FarEnd:
    """The requests that the near end may make: one method for each."""

    def __init__(self, bench: Bench, mine: Endpoint) -> None:
        self._bench = bench
        self._mine = mine
        self._lent: dict[str, Memory] = {}
        self._registered = Registered(bench)
        self._channels: dict[str, Channel] = {}
        self._orders: dict[str, Callable[..., dict[str, Any]]] = {
            "lend": self.lend, "join": self.join, "prepare": self.prepare, "read": self.read, "digest": self.digest,
            "fill": self.fill, "leave": self.leave, "end": self.end,
        }  # fmt: skip

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        name = order.pop("do", None)
        if name not in self._orders:
            raise ValueError(f"{name!r} is not an order: must be one of {', '.join(self._orders)}")
        return self._orders[name](**order)

    def lend(self, name: str, size: int, host: bool, seed: int) -> dict[str, Any]:
        if not 0 < size <= MOST_LENT:
            raise ValueError(f"{size} bytes are asked for: at least 1 and at most {MOST_LENT} are lent")
        memory = self._lent[name] = self._bench.malloc(size, host=host)
        self._bench.write(memory, pattern(seed, size))
        return {"address": memory.address}

    def fill(self, name: str, seed: int) -> dict[str, Any]:
        memory = self._lent[name]
        self._bench.write(memory, pattern(seed, memory.size))
        return {}

    def join(self, channel: str, table: str, names: list[str], expansion: int) -> dict[str, Any]:
        comm = init_communicator(self._bench, channel, table, RANK, expansion)
        joined = self._channels[channel] = Channel(self._bench, comm)
        for name in names:
            joined.bind(self._registered.handle_of(self._lent[name]))
        return {}

    def prepare(self, channel: str, seconds: int) -> dict[str, Any]:
        return {"code": self._channels[channel].prepare(min(seconds, 120))}

    def read(self, name: str, at: int, count: int) -> dict[str, Any]:
        memory = self._lent[name]
        if not (at >= 0 and 0 < count <= MOST_READ and at + count <= memory.size):
            raise ValueError(
                f"{count} bytes at {at} of {name!r}: it has {memory.size}, and at most {MOST_READ} are read"
            )
        return {"data": self._bench.read(memory, count, at).hex()}

    def digest(self, name: str) -> dict[str, Any]:
        memory = self._lent[name]
        return {"digest": hashlib.sha256(self._bench.read(memory, memory.size)).hexdigest()}

    def leave(self, channel: str) -> dict[str, Any]:
        return {"codes": self._channels.pop(channel).close()}

    def end(self) -> dict[str, Any]:
        """Free and close everything."""
        codes = [code for channel in self._channels.values() for code in channel.close()]
        self._channels.clear()
        codes += self._registered.end()
        codes += [self._bench.free(memory) for memory in self._lent.values()]
        self._lent.clear()
        return {"codes": codes}
