"""LLM-DataDist's v1 interface as its users know it: what it has beside v2's, every class, call and property.

Written as in ``api_v2``: behind ``await`` what moves bytes, waits, or runs a model.
"""

from __future__ import annotations

from typing import Final

CALLS: Final = """
await LLMDataDist.check_link_status(remote_cluster_id)
await LLMDataDist.add_model(model_options, model_runner=None)
await LLMDataDist.complete_request(llm_req)
LLMDataDist.check_capacity(seq_len)

KvCache(cache_id, cache_desc, per_device_tensor_addrs, kv_cache_manager)
KvCache.create_cpu_cache(cache_desc, addrs)

KvCacheManager(llm_engine, role)
KvCacheManager.is_initialized()
await KvCacheManager.allocate_cache(cache_desc, cache_keys=())
await KvCacheManager.deallocate_cache(cache)
await KvCacheManager.remove_cache_key(cache_key)
await KvCacheManager.pull_cache(cache_key, kv_cache, batch_index=0, size=-1, *, src_layer_range=None, \
dst_layer_range=None, src_cache_offset=None, dst_cache_offset=None, tensor_num_per_layer=2)
await KvCacheManager.copy_cache(dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)
await KvCacheManager.get_cache_tensors(cache, tensor_index=0)
await KvCacheManager.allocate_blocks_cache(cache_desc, blocks_cache_key=None)
await KvCacheManager.pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, *, \
src_layer_range=None, dst_layer_range=None, tensor_num_per_layer=2)
await KvCacheManager.copy_blocks(cache, copy_block_info)
await KvCacheManager.swap_blocks(src, dst, src_to_dst)
await KvCacheManager.transfer_cache_async(src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, \
dst_block_indices=None, dst_block_memory_size=None)
KvCacheManager.check_cache_key(cache_key)

LLMModel()
await LLMModel.pull_kv(llm_req)
await LLMModel.merge_kv(llm_req, batch_index, batch_id=0)
await LLMModel.preload_prompt_prefix(llm_req, inputs, **kwargs)
await LLMModel.release_prompt_prefix(llm_req)
await LLMModel.predict(llm_req, inputs, **kwargs)
await LLMModel.pull_blocks(llm_req, prompt_blocks=[], decoder_blocks=[])

ModelRunner()
ModelRunner.run_model(kv_cache, input_tensors, **kwargs)
ModelRunner.on_cache_allocated(kv_cache)
ModelRunner.on_cache_deallocated(kv_cache)

ModelConfig()
ModelConfig.generate_options()

LLMReq(req_id=2**64-1, prompt_length=0, prompt_cluster_id=0, decoder_cluster_id=0, prefix_id=2**64-1)
CapacityState(is_available, free_tokens_num, total_tokens_num)
TensorDesc(dtype, shape)
Tensor(data, tensor_desc=None)
Tensor.numpy(copy=False)
Tensor.from_tensor_tuple(tensor_tuple)
"""

READ_ONLY: Final = {
    "LLMDataDist": "kv_cache_manager",
    "KvCache": "cache_id cache_desc per_device_tensor_addrs",
    "CapacityState": "is_available free_tokens_num total_tokens_num",
    "TensorDesc": "dtype shape",
}

SETTABLE: Final = {
    "LLMConfig": "mem_utilization buf_pool_cfg enable_switch_role deploy_res_path cluster_info output_max_size",
    "ModelConfig": "kv_shapes kv_dtypes kv_seq_len_dim_index enable_page_attention enable_shared_system_prefix om_paths "
    "is_flow_model ge_options kv_tensor_format",
    "LLMReq": "req_id prompt_length prompt_cluster_id decoder_cluster_id prefix_id",
}
