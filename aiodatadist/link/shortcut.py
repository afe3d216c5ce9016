"""Small transfers of blocks between the same two caches, again and again: what does not change is kept, and the rest is one
call of C, which mostly ends before it returns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.task import AtOnce
from aiodatadist.counting import Flow
from aiodatadist.device import BlockRun, Program, Stream
from aiodatadist.values.grid import Grid

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.link.channels import LinkChannel

_FIRST = array("Q", [0])


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Gets, or puts, of whole blocks of all tensors between a cache of this end and one of the peer's, over one channel.

    Made when such a transfer took the long way, where everything was checked that does not change.

    Attributes:
        flow: where they are counted.
        common: what their tasks have in common.
    """

    direction: Literal["get", "put"]
    entry: Entry
    remote: RemoteCache
    link_channel: LinkChannel
    blocks: BlockRun
    flow: Flow
    common: AtOnce


def shortcut(
    direction: Literal["get", "put"],
    entry: Entry,
    remote: RemoteCache,
    link_channel: LinkChannel,
    stream: Stream,
    seconds: float,
    flow: Flow,
    common: AtOnce,
) -> Shortcut | None:
    """None: the channel does not move bytes by itself; within a process they are copied otherwise."""
    stride = entry.stride
    one_block = Grid(entry.addresses, remote.addresses, _FIRST, _FIRST, stride, stride, stride, stride)
    program = Program()
    add = link_channel.channel.add_get if direction == "get" else link_channel.channel.add_put
    add(program, one_block)
    if not program.is_one_sided:
        return None
    blocks = BlockRun(stream, program, entry.pieces, remote.pieces, max(1, round(seconds * 1000)))
    return Shortcut(direction, entry, remote, link_channel, blocks, flow, common)
