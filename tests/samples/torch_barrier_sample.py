"""Prefill and decode of a torch program: barriers of torch.distributed between the steps, tensors on the npu."""

import os

import torch
import torch.distributed as dist
import torch_npu
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, initialise, link, unlink
from torch.utils.data import DataLoader, TensorDataset

SHAPE = [8, 16, 2, 4]
DESC = CacheDesc(4, SHAPE, DataType.DT_FLOAT16)
RANK = 0 if IS_SERVER else 1
ME = SERVER if IS_SERVER else CLIENT

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
torch.npu.set_device(RANK)
torch_npu.npu.set_device(f"npu:{RANK}")
dist.init_process_group(backend="gloo", rank=RANK, world_size=2)
dist.barrier()

# What such programs ask of torch before they begin.
assert torch.npu.is_available()
assert torch_npu.npu.is_available()
assert torch.npu.device_count() >= 2
assert torch.npu.current_device() == RANK
assert torch.npu.is_initialized()
assert torch.npu.get_device_name(RANK)
free, total = torch.npu.mem_get_info()
assert 0 < free <= total
assert torch.npu.memory_allocated() >= 0
assert torch.npu.max_memory_allocated() >= 0
assert torch.npu.get_device_properties(RANK).total_memory == total
torch.npu.manual_seed_all(7)
torch.npu.empty_cache()
assert torch.accelerator.is_available()
assert torch.accelerator.current_accelerator().type == "npu"
assert torch.accelerator.device_count() == torch.npu.device_count()
torch.accelerator.set_device_index(RANK)
assert torch.accelerator.current_device_index() == RANK
torch.accelerator.synchronize()

with torch.npu.device(RANK), torch.npu.stream(torch.npu.Stream()):
    tensors = [torch.full(SHAPE, ME * 10 + i, dtype=torch.float16).to("npu") for i in range(4)]
loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, pin_memory=True)
assert [int(batch.sum()) for (batch,) in loader] == [6, 22]
pinned = torch.zeros(4).pin_memory()
assert pinned.to(f"npu:{RANK}", non_blocking=True).sum().item() == 0
torch.npu.synchronize()

datadist = initialise(enable_remote_cache_accessible=True)
cache = datadist.cache_manager.register_blocks_cache(DESC, [t.data_ptr() for t in tensors], BlocksCacheKey(ME))
dist.barrier()  # the prompt cluster listens
if not IS_SERVER:
    link(datadist)
dist.barrier()
if not IS_SERVER:
    datadist.cache_manager.pull_blocks(BlocksCacheKey(SERVER), cache, [1, 6], [0, 3])
    for i, tensor in enumerate(tensors):
        assert (tensor.cpu()[[0, 3]] == SERVER * 10 + i).all()
dist.barrier()  # decode has what it wanted
words = [None, None]
dist.all_gather_object(words, f"rank {RANK}")
assert words == ["rank 0", "rank 1"]
sums = torch.tensor([float(RANK + 1)])
dist.all_reduce(sums)
assert sums.item() == 3
if not IS_SERVER:
    unlink(datadist)
dist.barrier()
datadist.finalize()
dist.destroy_process_group()
