"""v1: the server's model computes the cache of two requests; the client's goes on with them in one batch."""

import numpy as np
from llm_datadist import DataType, LLMConfig, LLMDataDist, LLMReq, LLMRole, LLMStatusCode, ModelConfig, ModelRunner
from sample_common import CLIENT, HOSTS, IS_SERVER, PORT, SERVER, hear, link, say, status_of, unlink, write

TENSORS, BATCH, TOKENS, WIDTH = 4, 2, 16, 8
IDLE = LLMReq()


class Runner(ModelRunner):
    """Writes each slot's tokens behind those that are there, and answers with all that the slots hold."""

    def __init__(self, manager):
        self.manager = manager
        self.told = []

    def run_model(self, kv_cache, input_tensors, **kwargs):
        for slot, first, tokens in input_tensors:
            for tensor, address in enumerate(kv_cache.per_device_tensor_addrs[0]):
                rows = np.repeat(np.float32(tokens)[:, None] + 100 * tensor, WIDTH, 1)
                write(address + (slot * TOKENS + first) * WIDTH * 4, rows.tobytes())
        held = [self.manager.get_cache_tensors(kv_cache, t)[0].numpy() for t in range(TENSORS)]
        return [[array[slot, : kwargs["lengths"][slot], WIDTH - 1].tolist() for array in held] for slot in range(BATCH)]

    def on_cache_allocated(self, kv_cache):
        self.told.append("allocated")

    def on_cache_deallocated(self, kv_cache):
        self.told.append("deallocated")


def open_one():
    config = LLMConfig()
    config.device_id = 0 if IS_SERVER else 1
    config.sync_kv_timeout = 5000
    config.ge_options = {"ge.flowGraphMemMaxSize": "4194304"}
    if IS_SERVER:
        config.listen_ip_info = f"{HOSTS[SERVER]}:{PORT}"
    datadist = LLMDataDist(LLMRole.PROMPT, SERVER) if IS_SERVER else LLMDataDist(LLMRole.DECODER, CLIENT)
    datadist.init(config.generate_options())
    return datadist


def model_options():
    config = ModelConfig()
    config.kv_shapes = [f"{BATCH},{TOKENS},{WIDTH}"] * TENSORS
    config.kv_dtypes = [DataType.DT_FLOAT] * TENSORS
    config.kv_tensor_format = "BSH"
    return config.generate_options()


def request(req_id, prompt_length):
    return LLMReq(req_id, prompt_length, SERVER, CLIENT)


def in_each_tensor(tokens):
    return [[token + 100.0 * tensor for token in tokens] for tensor in range(TENSORS)]


datadist = open_one()
runner = Runner(datadist.kv_cache_manager)
model = datadist.add_model(model_options(), runner)
ten, eleven = request(10, 3), request(11, 2)
if IS_SERVER:
    assert datadist.check_capacity(3 * BATCH).is_available
    answer = model.predict([ten, eleven], [(0, 0, [1, 2, 3]), (1, 0, [7, 8])], lengths=[3, 2])
    assert answer == [in_each_tensor([1, 2, 3]), in_each_tensor([7, 8])]
    assert status_of(model.predict, ten, []) == LLMStatusCode.LLM_REPEAT_REQUEST
    say("ready")
    hear("done")
    for each in (ten, eleven):
        datadist.complete_request(each)
    assert runner.told == []
else:
    hear("ready")
    link(datadist)
    model.pull_kv(eleven)
    assert status_of(model.merge_kv, ten, 0) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    model.merge_kv(eleven, 0)
    model.pull_kv(ten)
    model.merge_kv(ten, batch_index=1)
    answer = model.predict([eleven, ten], [(0, 2, [9]), (1, 3, [4])], lengths=[3, 4])
    assert answer == [in_each_tensor([7, 8, 9]), in_each_tensor([1, 2, 3, 4])]
    datadist.complete_request(eleven)
    answer = model.predict([IDLE, ten], [(1, 4, [5])], lengths=[0, 5])
    assert answer[1] == in_each_tensor([1, 2, 3, 4, 5])
    unlink(datadist)
    say("done")
    assert runner.told == ["allocated"]
datadist.finalize()
assert runner.told == ([] if IS_SERVER else ["allocated", "deallocated"])
