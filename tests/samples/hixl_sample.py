"""With the hixl backend a link belongs to its initiator: both ends make theirs, and each ends its own."""

import sys

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode
from sample_common import (
    CLIENT,
    HOSTS,
    IS_SERVER,
    PORT,
    SERVER,
    hear,
    initialise,
    link,
    peer,
    read,
    say,
    stamp,
    status_of,
    unlink,
    write,
)

BLOCK, BLOCKS = 4096, 4
DESC = CacheDesc(1, [BLOCKS, BLOCK], DataType.DT_UINT8)
POOL = '{"memory_size": 4194304}'
ME, OTHER = (SERVER, CLIENT) if IS_SERVER else (CLIENT, SERVER)

datadist = initialise(
    transfer_backend="hixl",
    global_resource_config="{}",
    mem_pool_cfg=POOL,
    listen_ip_info=f"{HOSTS[ME]}:{PORT if IS_SERVER else PORT + 1}",
)
manager = datadist.cache_manager
cache = manager.allocate_blocks_cache(DESC, BlocksCacheKey(ME))
address = cache.tensor_addrs[0]
for block in range(BLOCKS):
    write(address + block * BLOCK, stamp(ME, 0, block, BLOCK))
the_other = peer(OTHER, PORT + 1 if IS_SERVER else PORT)


def pull(block):
    manager.pull_blocks(BlocksCacheKey(OTHER), cache, [block], [3])
    assert read(address + 3 * BLOCK, BLOCK) == stamp(OTHER, 0, block, BLOCK)


say("listening")
hear("listening")
link(datadist, the_other)
pull(0)
assert datadist.link_clusters([the_other], 5000)[0] == LLMStatusCode.LLM_ALREADY_LINK
say("linked")
hear("linked")
if IS_SERVER:
    unlink(datadist, the_other)
    assert status_of(pull, 1) == LLMStatusCode.LLM_NOT_YET_LINK
    say("unlinked")
    hear("pulled")
else:
    hear("unlinked")
    pull(2)
    unlink(datadist, the_other)
    say("pulled")
datadist.finalize()
sys.exit(0)
