"""A cluster of the next minor version, in a process of its own.

Arguments: whether transfers are one-sided (1 or 0); and, for one that links to cluster 2, that one's port. Without it
prints its own, and waits for its standard input to end.
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from aiodatadist import LLMClusterInfo
from aiodatadist.testing import open_cluster
from tests.test_versions import DESC, mode, speak_newer, use


async def main(one_sided: int, port: int = 0) -> None:
    async with open_cluster(1, **mode(bool(one_sided))) as cluster:
        cache = await cluster.blocks(DESC)
        if port:
            peer = LLMClusterInfo(2)
            peer.append_remote_ip_info("127.0.0.1", port)
            await use(cluster, peer, cache, bool(one_sided))
            return
        address = cluster.datadist.listen_address
        print(address[1] if address else 0, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    speak_newer(setattr)
    anyio.run(lambda: main(*(int(argument) for argument in sys.argv[1:])))
