"""A cluster in a process of its own, for tests that kill it. Prints its port, then waits for its standard input to end."""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from aiodatadist import CacheDesc, DataType, LLMRole
from aiodatadist.testing import open_cluster

DESC = CacheDesc(4, [64, 1 << 18], DataType.DT_UINT8)


async def main() -> None:
    async with open_cluster(1, LLMRole.PROMPT) as cluster:
        await cluster.blocks(DESC)
        address = cluster.datadist.listen_address
        print(address[1] if address else 0, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    anyio.run(main)
