"""ContextCache: processes that save and load the same blocks through a Redis server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsException
from tests.context_caching.servers import RedisServer, running
from tests.soak.kit import Footprint, Hog, Settings, parse, spin, value

if TYPE_CHECKING:
    from tests.soak.__main__ import Outcome

BLOCK = 16
PROMPTS = 64
LENGTH = 8
PERIODS = {"idle": 20.0, "load": 0.0, "busy": 0.1}


def soak_context(settings: Settings, outcome: Outcome) -> None:
    """Two processes beside this one, over one server."""
    server = RedisServer()
    with running(server), ExitStack() as stack:
        users = []
        for seed in range(2):
            command = [sys.executable, "-m", "tests.soak.context", *settings.arguments(), f"--first={seed}", server.url]
            users.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)))
        for user in users:
            answer = json.loads(user.communicate()[0] or b'{"lost": ["a user\'s process ended"]}')
            outcome.lost += answer["lost"]
            outcome.wrong += answer.get("wrong", [])
            outcome.transfers += answer.get("transfers", 0)
            outcome.footprints.append(answer.get("footprints"))


class User:
    """Loads what is there of a prompt, looks at it, computes the rest, and saves all."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self._chance = random.Random(seed)
        layers = min(settings.layers, 8)
        self._kv = [[np.zeros((256, BLOCK, 1024), np.uint8) for _ in "KV"] for _ in range(layers)]
        self.answer: dict[str, Any] = {"lost": [], "wrong": [], "transfers": 0}

    async def use(self, url: str) -> None:
        config = CcConfig_v1(rank_id=0, device_id=0, model_id="soak")
        async with await ContextCache.open(config, url, read_cache_bytes=64 << 20) as cache:
            await cache.register_kvcache(self._kv)
            await self._once(cache)
            before = Footprint.now()
            end = time.monotonic() + self._settings.seconds
            while (left := end - time.monotonic()) > 0:
                await anyio.sleep(min(left, PERIODS[self._settings.mode]))
                if self._settings.mode == "busy":
                    spin(0.1)
                await self._once(cache)
            self.answer["footprints"] = [vars_of(before), vars_of(Footprint.now())]

    async def _once(self, cache: ContextCache) -> None:
        prompt = self._chance.randrange(PROMPTS)
        hashes = [1 + prompt * LENGTH + i for i in range(LENGTH)]
        table = self._chance.sample(range(256), LENGTH)
        chunks = [[(BLOCK * block, BLOCK) for block in table]]
        try:
            loaded = (await cache.load(hashes, chunks=chunks, timeout=20.0)).success
            self._look(hashes[:loaded], table)
            self._compute(hashes, table)
            await cache.save(hashes, chunks=chunks, timeout=20.0)
        except EmsException as error:
            self.answer["lost"].append(str(error))
        self.answer["transfers"] += 1

    def _look(self, hashes: list[int], table: list[int]) -> None:
        for number, block in zip(hashes, table, strict=False):
            for layer, tensors in enumerate(self._kv):
                if not all(
                    (tensor[block] == value(number, 2 * layer + i, 0)).all() for i, tensor in enumerate(tensors)
                ):
                    self.answer["wrong"].append(f"hash {number} layer {layer}")

    def _compute(self, hashes: list[int], table: list[int]) -> None:
        for number, block in zip(hashes, table, strict=True):
            for layer, tensors in enumerate(self._kv):
                for i, tensor in enumerate(tensors):
                    tensor[block] = value(number, 2 * layer + i, 0)


def vars_of(footprint: Footprint) -> dict[str, int]:
    return {"files": footprint.files, "threads": footprint.threads, "resident": footprint.resident}


def main() -> None:
    settings, others = parse(sys.argv[1:-1])
    hog = Hog()
    if settings.mode == "busy":
        hog.start()
    user = User(settings, others.first)
    anyio.run(user.use, sys.argv[-1], backend_options={"use_uvloop": settings.loop == "uvloop"})
    print(json.dumps(user.answer))


if __name__ == "__main__":
    main()
