"""Blocks of torch tensors on the npu."""

import torch
import torch_npu  # noqa: F401
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, say, unlink

SHAPE = [8, 16, 2, 4]
DESC = CacheDesc(4, SHAPE, DataType.DT_FLOAT16)
ME = SERVER if IS_SERVER else CLIENT

torch.npu.set_device(0 if IS_SERVER else 1)
assert torch.npu.is_available()
assert torch.npu.current_device() == (0 if IS_SERVER else 1)
if IS_SERVER:
    tensors = [torch.full(SHAPE, ME * 10 + i, dtype=torch.float16).npu() for i in range(4)]
else:
    tensors = [torch.full(SHAPE, ME * 10 + i, dtype=torch.float16, device="npu:1") for i in range(4)]
before = tensors[0].cpu()
done = torch.npu.Event()
done.record(torch.npu.current_stream())
done.synchronize()
datadist = initialise(enable_remote_cache_accessible=True)
cache = datadist.cache_manager.register_blocks_cache(DESC, [t.data_ptr() for t in tensors], BlocksCacheKey(ME))
if IS_SERVER:
    say("ready")
    hear("done")
else:
    hear("ready")
    link(datadist)
    datadist.cache_manager.pull_blocks(BlocksCacheKey(SERVER), cache, [1, 6], [0, 3])
    torch.npu.synchronize()
    for i, tensor in enumerate(tensors):
        host = tensor.cpu()
        assert (host[[0, 3]] == SERVER * 10 + i).all()
        assert (host[[1, 2, 4, 5, 6, 7]] == CLIENT * 10 + i).all()
    assert (before == CLIENT * 10).all()  # a copy, as it is on an NPU
    unlink(datadist)
    say("done")
datadist.finalize()
