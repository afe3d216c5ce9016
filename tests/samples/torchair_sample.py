"""A cache that the library allocates, as tensors on the npu; pulled by the other process's."""

import torch
import torch_npu  # noqa: F401
import torchair
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, say, unlink

SHAPE = [8, 16, 2, 4]
DESC = CacheDesc(4, SHAPE, DataType.DT_FLOAT16)
ME = SERVER if IS_SERVER else CLIENT

datadist = initialise(enable_remote_cache_accessible=True, mem_pool_cfg='{"memory_size": 8388608}')
cache = datadist.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(ME))
tensors = torchair.llm_datadist.create_npu_tensors(SHAPE, torch.float16, cache.tensor_addrs)
for i, tensor in enumerate(tensors):
    tensor.fill_(ME * 10 + i)
torch.npu.synchronize()
if IS_SERVER:
    say("ready")
    hear("done")
else:
    hear("ready")
    link(datadist)
    datadist.cache_manager.pull_blocks(BlocksCacheKey(SERVER), cache, [2], [7])
    for i, tensor in enumerate(tensors):
        assert list(tensor.shape) == SHAPE
        assert (tensor[7].cpu() == SERVER * 10 + i).all()
        assert (tensor[:7].cpu() == CLIENT * 10 + i).all()
    unlink(datadist)
    say("done")
datadist.finalize()
