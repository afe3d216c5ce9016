"""LLM-DataDist's v2 interface as its users know it: every class, call, property and constant, in upstream's order.

A call is written as it is defined upstream, behind ``await`` where it moves bytes or waits for a peer. What upstream takes
out of ``**kwargs`` stands behind the ``*``.
"""

from __future__ import annotations

from typing import Final

CALLS: Final = """
LlmConfig()
LLMConfig()
LLMConfig.generate_options()
LLMConfig.gen_options()

LLMDataDist(role, cluster_id)
await LLMDataDist.init(options)
await LLMDataDist.finalize()
await LLMDataDist.link_clusters(clusters, timeout=3000)
await LLMDataDist.unlink_clusters(clusters, timeout=3000, force=False)
await LLMDataDist.switch_role(role, switch_options=None)
await LLMDataDist.link(comm_name, cluster_rank_info, rank_table)
await LLMDataDist.unlink(comm_id)
LLMDataDist.query_register_mem_status(comm_id)

LLMClusterInfo()
LLMClusterInfo.append_local_ip_info(ip, port)
LLMClusterInfo.append_remote_ip_info(ip, port)

LLMException(*args, status_code=LLMStatusCode.LLM_SUCCESS)
Status(status)
Status.is_ok()

CacheDesc(num_tensors, shape, data_type, placement=Placement.DEVICE, batch_dim_index=0, seq_len_dim_index=-1, \
kv_tensor_format=None)
CacheDesc.update_dim(dim_index, dim_value)
Cache(cache_id, cache_desc, tensor_addrs, cache_manager, is_registered, is_blocks_cache)
Cache.create_cpu_cache(cache_desc, addrs)
CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64-1)
CacheKeyByIdAndIndex(cluster_id, cache_id, batch_index=0)
BlocksCacheKey(cluster_id, model_id=0)
MemInfo(mem_type, addr, size)

CacheManager(llm_datadist, options)
await CacheManager.allocate_cache(cache_desc, cache_keys=())
await CacheManager.deallocate_cache(cache)
await CacheManager.remove_cache_key(cache_key)
await CacheManager.pull_cache(cache_key, cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, \
tensor_num_per_layer=2)
await CacheManager.copy_cache(dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)
await CacheManager.allocate_blocks_cache(cache_desc, blocks_cache_key=None)
await CacheManager.deallocate_blocks_cache(cache)
await CacheManager.pull_blocks(src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), *, src_layer_range=None, \
dst_layer_range=None, tensor_num_per_layer=2)
await CacheManager.copy_blocks(cache, copy_block_info)
await CacheManager.swap_blocks(src_cache, dst_cache, src_to_dst)
await CacheManager.register_cache(cache_desc, addrs, cache_keys=(), remote_accessible=None)
await CacheManager.register_blocks_cache(cache_desc, addrs, blocks_cache_key=None, remote_accessible=None)
await CacheManager.push_cache(dst_cache_key, src_cache, src_batch_index=0, src_layer_range=None, dst_layer_range=None, \
size=-1, tensor_num_per_layer=2)
await CacheManager.push_blocks(dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), src_layer_range=None, \
dst_layer_range=None, tensor_num_per_layer=2)
await CacheManager.transfer_cache_async(src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, \
dst_block_indices=None, dst_block_memory_size=None)
await CacheManager.unregister_cache(cache_id)
CacheManager.remap_registered_memory(mem_infos)
CacheManager.set_is_call_linked()
CacheManager.check_cache_key(cache_key)

LayerSynchronizer()
await LayerSynchronizer.synchronize_layer(layer_index, timeout_in_millis)
TransferConfig(dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0)
TransferWithCacheKeyConfig(cache_key, src_layer_range=None, dst_layer_range=None, src_batch_index=0)
CacheTask(transfer_async_task)
await CacheTask.synchronize(timeout_in_millis=None)
await CacheTask.get_results(timeout_in_millis=None)
"""

READ_ONLY: Final = {
    "LLMDataDist": "cache_manager cluster_id",
    "LLMConfig": "options",
    "LLMClusterInfo": "local_ip_info_list remote_ip_info_list",
    "LLMException": "status_code",
    "Status": "status_code",
    "CacheDesc": "num_tensors shape data_type batch_dim batch_size seq_len_dim_index size kv_tensor_format placement",
    "Cache": "cache_id cache_desc tensor_addrs is_blocks_cache",
    "CacheKey": "cluster_id prompt_cluster_id req_id model_id prefix_id",
    "CacheKeyByIdAndIndex": "cluster_id cache_id batch_index",
    "BlocksCacheKey": "cluster_id prompt_cluster_id model_id",
    "MemInfo": "mem_type addr size",
}

SETTABLE: Final = {
    "LLMConfig": "device_id listen_ip_info sync_kv_timeout ge_options enable_cache_manager mem_pool_cfg host_mem_pool_cfg "
    "enable_remote_cache_accessible rdma_traffic_class rdma_service_level local_comm_res link_total_time "
    "link_retry_count transfer_backend global_resource_config",
    "LLMClusterInfo": "remote_cluster_id remote_role_type",
    "TransferConfig": "dst_cluster_id dst_addrs src_layer_range src_batch_index",
    "TransferWithCacheKeyConfig": "cache_key src_layer_range dst_layer_range src_batch_index dst_cluster_id",
}

BASE: Final = 0x5010B000

CONSTANTS: Final = {
    "LLMRole": {"PROMPT": 1, "DECODER": 2, "MIX": 3},
    "Placement": {"HOST": 0, "DEVICE": 1},
    "RegisterMemStatus": {"OK": 0, "PREPARING": 1, "FAILED": 2},
    "Memtype": {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1},
    "PushType": {"NO_CACHE_KEY": 0, "BLOCKS_CACHE_KEY": 1, "CACHE_KEY_BY_ID": 2},
    "DataType": {
        "DT_FLOAT": 0,
        "DT_FLOAT16": 1,
        "DT_INT8": 2,
        "DT_INT32": 3,
        "DT_UINT8": 4,
        "DT_INT16": 6,
        "DT_UINT16": 7,
        "DT_UINT32": 8,
        "DT_INT64": 9,
        "DT_UINT64": 10,
        "DT_DOUBLE": 11,
        "DT_BOOL": 12,
        "DT_STRING": 13,
        "DT_BF16": 27,
    },
    "LLMStatusCode": {
        "LLM_SUCCESS": 0,
        "LLM_FAILED": 0xFFFFFFFF,
        "LLM_WAIT_PROCESS_TIMEOUT": BASE + 1,
        "LLM_KV_CACHE_NOT_EXIST": BASE + 2,
        "LLM_REPEAT_REQUEST": BASE + 3,
        "LLM_REQUEST_ALREADY_COMPLETED": BASE + 4,
        "LLM_PARAM_INVALID": BASE + 5,
        "LLM_ENGINE_FINALIZED": BASE + 6,
        "LLM_NOT_YET_LINK": BASE + 7,
        "LLM_ALREADY_LINK": BASE + 8,
        "LLM_LINK_FAILED": BASE + 9,
        "LLM_UNLINK_FAILED": BASE + 10,
        "LLM_NOTIFY_PROMPT_UNLINK_FAILED": BASE + 11,
        "LLM_CLUSTER_NUM_EXCEED_LIMIT": BASE + 12,
        "LLM_PROCESSING_LINK": BASE + 13,
        "LLM_DEVICE_OUT_OF_MEMORY": BASE + 14,
        "LLM_PREFIX_ALREADY_EXIST": BASE + 15,
        "LLM_PREFIX_NOT_EXIST": BASE + 16,
        "LLM_SEQ_LENOVERLIMIT": BASE + 17,
        "LLM_NO_FREE_BLOCK": BASE + 18,
        "LLM_BLOCKS_OUT_OF_MEMORY": BASE + 19,
        "LLM_EXIST_LINK": BASE + 24,
        "LLM_FEATURE_NOT_ENABLED": BASE + 25,
        "LLM_TIMEOUT": BASE + 26,
        "LLM_LINK_BUSY": BASE + 27,
        "LLM_OUT_OF_MEMORY": BASE + 28,
        "LLM_DEVICE_MEM_ERROR": 507053,
        "LLM_SUSPECT_REMOTE_ERROR": 507057,
        "LLM_UNKNOWN_ERROR": -1,
    },
}
