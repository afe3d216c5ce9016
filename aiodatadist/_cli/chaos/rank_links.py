"""Links by rank table: both ends ask for one whenever there is none."""

from __future__ import annotations

import json
import random

import anyio

from aiodatadist import LLMException, NotLinked, RegisterMemStatus
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import PULLER, PULLER_DEVICE
from aiodatadist._cli.chaos.tally import GOOD


class RankLinks:
    """An end of the link between one of the owner's clusters and the puller.

    Args:
        owner: the owner's cluster, which has rank 0.
    """

    def __init__(self, side: Side, door: Door, owner: int) -> None:
        self._side, self._door, self._datadist = side, door, door.datadist
        self._peer = owner if door.cluster_id == PULLER else PULLER
        self._ranks = {owner: 0, PULLER: 1}
        self._name = f"{side.settings.group} {owner}"
        self._table = _table([side.settings.clusters.index(owner), PULLER_DEVICE])
        self._number: int | None = None

    async def one(self, chance: random.Random) -> None:
        """Link to the other end if there is no link; end the link now and then."""
        try:
            with anyio.move_on_after(chance.choice((0.05, 0.5, 2.0)) * chance.random()):
                await self._door.wait_closed(self._peer)
        except NotLinked:
            await self._meet()
            return
        if chance.random() < 0.1 and not self._side.profile.is_calm:
            await self.end()

    async def _meet(self) -> None:
        await self.end()
        try:
            self._number = await self._datadist.link(self._name, self._ranks, self._table)
            status = await self._datadist.wait_register_mem_status(self._number)
        except LLMException as error:
            self._side.ended("link by ranks", error)
            await anyio.sleep(0.05)
        else:
            self._side.tally.ended("link by ranks", GOOD if status is RegisterMemStatus.OK else status.name)

    async def end(self) -> None:
        """End the link, only at this end if the other one has ended."""
        number, self._number = self._number, None
        if number is None:
            return
        try:
            await self._datadist.unlink(number)
        except LLMException as error:
            self._side.ended("unlink by ranks", error)
        else:
            self._side.tally.ended("unlink by ranks", GOOD)
        try:
            status = self._datadist.query_register_mem_status(number)
        except NotLinked:
            return
        self._side.violated("I5", f"communicator {number} is unlinked, and {status.name}")


def _table(device_ids: list[int]) -> str:
    devices = [
        {"device_id": str(number), "device_ip": f"10.0.0.{rank + 1}", "rank_id": str(rank)}
        for rank, number in enumerate(device_ids)
    ]
    servers = [{"server_id": "10.0.0.1", "device": devices}]
    return json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": servers})
