"""A process of several whose tasks save, load, ask for, remove and expire the same few keys in one pool.

All bytes of a value hold one number, which names its key, its writer and its time. A load must bring one such number of its
key, in all layers; anything else is printed. Arguments: the pool's URL, this process's number, seconds, seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

import anyio
import numpy as np

from aiodatadist.context_caching import ContextCache, EmsException
from tests.context_caching.kit import BLOCK, BLOCKS, Kv, by_slots, opened

KEYS = range(1, 9)
ROWS = (((8, 128), (8, 128)),) * 3
"""48 KiB in a value, so that one is not written in one go."""


class Racer:
    """Tasks of one process: ``found`` counts what happened, ``wrong`` lists what must not."""

    def __init__(self, cache: ContextCache, kv: Kv, number: int, url: str) -> None:
        self._cache = cache
        self._views = [tensor.view(np.uint16) for layer in kv.layers for tensor in layer]
        self._number = number
        self._url = url
        self._saved = 0
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def race(self, block: int, chance: random.Random, end: float) -> None:
        """Run one task, which has its own block."""
        acts = {"save": 4, "load": 6, "exists": 1, "remove": 2, "expire": 1}
        while anyio.current_time() < end:
            key = chance.choice(KEYS)
            what = chance.choices(list(acts), list(acts.values()))[0]
            try:
                await getattr(self, what)(key, block)
            except EmsException as error:
                self.found[f"{what} {type(error).__name__}"] += 1

    async def save(self, key: int, block: int) -> None:
        self._saved += 1
        stamp = key << 12 | self._number << 10 | self._saved % 1024
        for view in self._views:
            view[block] = stamp
        result = await self._cache.save([key], **by_slots([block]))
        self.found[f"saved {result.success}"] += 1

    async def load(self, key: int, block: int) -> None:
        for view in self._views:
            view[block] = 0
        result = await self._cache.load([key], **by_slots([block]))
        self.found["hits" if result.success else "misses"] += 1
        if result.success:
            self._look(key, block)

    def _look(self, key: int, block: int) -> None:
        stamps = sorted({int(stamp) for view in self._views for stamp in np.unique(view[block])})
        if len(stamps) != 1 or stamps[0] >> 12 != key:
            self.wrong.append(f"key {key} gave {[hex(stamp) for stamp in stamps[:8]]}")

    async def exists(self, key: int, block: int) -> None:
        self.found[f"exists {(await self._cache.exists([key])).success}"] += 1

    async def remove(self, key: int, block: int) -> None:
        await self._cache.remove([key])
        self.found["removed"] += 1

    async def expire(self, key: int, block: int) -> None:
        """Let a random key of a Redis server expire in a millisecond. Other pools are left alone."""
        if not self._url.startswith("redis://"):
            return
        host, _, port = self._url.removeprefix("redis://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b"*1\r\n$9\r\nRANDOMKEY\r\n")
            reply = await stream.receive()
            if reply.startswith(b"$") and not reply.startswith(b"$-1"):
                name = reply.partition(b"\r\n")[2].removesuffix(b"\r\n")
                await stream.send(b"*3\r\n$7\r\nPEXPIRE\r\n$%d\r\n%s\r\n$1\r\n1\r\n" % (len(name), name))
                await stream.receive()
                self.found["expired"] += 1


async def main(url: str, number: int, seconds: float, seed: int) -> None:
    kv = Kv(rows=ROWS, blocks=BLOCKS, block=BLOCK)
    async with opened(url, kv) as cache:
        racer, end = Racer(cache, kv, number, url), anyio.current_time() + seconds
        async with asyncio.TaskGroup() as group:
            for block in range(BLOCKS):
                group.create_task(racer.race(block, random.Random(f"{seed} {number} {block}"), end))
    print(json.dumps({"found": racer.found, "wrong": racer.wrong}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
