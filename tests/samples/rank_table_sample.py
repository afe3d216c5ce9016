"""Two servers of a rank table, with names and with addresses of their own: link, wait for the memory, and pull over it."""

import json
import os
import time
from pathlib import Path

import numpy as np
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, RegisterMemStatus
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, say

DESC = CacheDesc(2, [4, 512], DataType.DT_UINT8)
ME = SERVER if IS_SERVER else CLIENT
HOSTS = os.environ.get("SAMPLE_HOSTS", "127.0.0.2 127.0.0.3").split()
NAMES = ("xxxx", "1")


def table():
    servers = []
    for rank, (name, host) in enumerate(zip(NAMES, HOSTS, strict=True)):
        device = {"device_id": str(rank), "device_ip": f"10.0.0.{rank + 1}", "rank_id": str(rank)}
        servers.append({"server_id": name, "host_ip": host, "device": [device]})
    return json.dumps({"version": "1.0", "server_count": "2", "status": "completed", "server_list": servers})


def listens_at(host):
    number = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    return f" {number}:" in Path("/proc/self/net/tcp").read_text(encoding="ascii")


def wait_for(datadist, number):
    deadline = time.monotonic() + 10
    while datadist.query_register_mem_status(number) == RegisterMemStatus.PREPARING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert datadist.query_register_mem_status(number) == RegisterMemStatus.OK


datadist = initialise(enable_remote_cache_accessible=True, listen_ip_info="", link_total_time=10)
manager = datadist.cache_manager
tensors = [np.full(DESC.shape, 10 * ME + i, np.uint8) for i in range(2)]
cache = manager.register_blocks_cache(DESC, [t.ctypes.data for t in tensors], BlocksCacheKey(ME))
name = input() if not IS_SERVER else f"group of {tensors[0].ctypes.data}"
if IS_SERVER:
    say(name)
number = datadist.link(name, {SERVER: 0, CLIENT: 1}, table())
wait_for(datadist, number)
if IS_SERVER:
    assert listens_at(HOSTS[0])
    say("linked")
    hear("pulled")
else:
    hear("linked")
    manager.pull_blocks(BlocksCacheKey(SERVER), cache, [3], [0])
    assert [int(t[0, 0]) for t in tensors] == [10, 11]
    assert [int(t[1, 0]) for t in tensors] == [20, 21]
    say("pulled")
datadist.finalize()
