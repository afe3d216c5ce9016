"""A cluster in a process of its own, for tests that kill it. Prints its port, then waits for its standard input to end.

Arguments: its cluster id (1), and which blocks cache it has (0: DESC; 1: LAYERED).
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from aiodatadist import CacheDesc, DataType, LLMRole
from aiodatadist.testing import open_cluster

DESC = CacheDesc(4, [64, 1 << 16], DataType.DT_UINT8)
LAYERED = CacheDesc(8, [16, 1 << 16], DataType.DT_UINT8)


async def main(cluster_id: int = 1, which: int = 0) -> None:
    async with open_cluster(cluster_id, LLMRole.PROMPT) as cluster:
        await cluster.blocks((DESC, LAYERED)[which])
        address = cluster.datadist.listen_address
        print(address[1] if address else 0, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    anyio.run(lambda: main(*(int(argument) for argument in sys.argv[1:])))
