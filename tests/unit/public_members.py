"""The members of each public class: methods, properties and attributes, without those that it inherits.

A new member must be put here on purpose: what is public must be documented, and may no longer change its meaning. Whatever
the package alone needs has an underscore, or belongs to an inner object.
"""

from __future__ import annotations

from typing import Final

MEMBERS: Final = {
    "aiodatadist._blocking.block_lease.BlockLease": "ended name renew ticket wait_ended withdraw",
    "aiodatadist._blocking.cache_manager.CacheManager": (
        "allocate_blocks_cache allocate_cache arrays check_cache_key copy_blocks copy_cache deallocate_blocks_cache "
        "deallocate_cache drain lease_blocks max_submitted pool_usage pull_blocks pull_cache pull_leased push_blocks "
        "push_cache receive_layers register_blocks_cache register_cache release_lease remap_registered_memory "
        "remove_cache_key set_is_call_linked submit_layers submit_pull_blocks submit_pull_cache submit_push_blocks "
        "submit_push_cache swap_blocks tensors transfer_cache_async unregister_cache"
    ),
    "aiodatadist._blocking.cache_task.CacheTask": "cancel cancelled done exception get_results synchronize",
    "aiodatadist._blocking.config.LLMConfig": "enable_cache_manager enable_remote_cache_accessible generate_options",
    "aiodatadist._blocking.datadist.LLMDataDist": (
        "add_model cache_manager check_capacity check_link_status close cluster_id complete_request figures finalize init "
        "kv_cache_manager link link_clusters link_to listen_address next_notification notify observer "
        "query_register_mem_status statistics stats switch_role unlink unlink_clusters unlink_from wait_link_closed "
        "wait_linked wait_register_mem_status"
    ),
    "aiodatadist._blocking.kv_cache_manager.KvCacheManager": (
        "allocate_blocks_cache allocate_cache arrays check_cache_key copy_blocks copy_cache deallocate_cache "
        "get_cache_tensors is_initialized pool_usage pull_blocks pull_cache remove_cache_key swap_blocks tensors "
        "transfer_cache_async"
    ),
    "aiodatadist._blocking.hixl.engine.Hixl": (
        "connect connect_async deregister_mem disconnect disconnect_async finalize get_all_async_connect_status "
        "get_all_transfer_status get_async_connect_status get_notifies get_transfer_status initialize register_mem "
        "send_notify transfer_async transfer_sync"
    ),
    "aiodatadist._blocking.hixl.values.GetTransferStatusArgs": "max_query_count skip_waiting",
    "aiodatadist._blocking.hixl.values.TransferArgs": "user_data",
    "aiodatadist._blocking.hixl.values.TransferResult": "req status user_data",
    "aiodatadist._blocking.layers.LayerReceiver": "landed wait_layer",
    "aiodatadist._blocking.layers.LayerSynchronizer": "synchronize_layer",
    "aiodatadist._blocking.layers.LayersHandle": "layer_failed layer_ready start_with",
    "aiodatadist._blocking.model.LLMModel": (
        "merge_kv model_id predict preload_prompt_prefix pull_blocks pull_kv release_prompt_prefix"
    ),
    "aiodatadist._blocking.stats.Stats": (
        "bytes cancelled failed failures longest_seconds queue_seconds ranges running started succeeded transfer_seconds"
    ),
    "aiodatadist._blocking.submitted.Handle": "cancel done exception failed_blocks operation poll report tag wait",
    "aiodatadist._cache.pool.PoolUsage": "free largest pinned total withheld",
    "aiodatadist._cache.task.CacheTask": (
        "add_done_callback cancel cancelled done exception get_results peer progress result synchronize"
    ),
    "aiodatadist._cache_manager.block_pool.BlockPool": "cache count free manager take wait_all_free waiting",
    "aiodatadist._cache_manager.block_pool.TakenBlocks": "blocks lease",
    "aiodatadist._cache_manager.caches.Caches": (
        "allocate_blocks_cache allocate_cache arrays check_cache_key copy_blocks copy_cache deallocate_blocks_cache "
        "deallocate_cache pool_usage register_blocks_cache register_cache remap_registered_memory remove_cache_key "
        "swap_blocks tensors unregister_cache wait_usable"
    ),
    "aiodatadist._cache_manager.manager.CacheManager": (
        "lease_blocks pull_blocks pull_cache pull_leased push_blocks push_cache receive_layers release_lease "
        "transfer_cache_async"
    ),
    "aiodatadist._cluster.link_changes.LinkChange": "attempt cluster_id generation next_delay reason state",
    "aiodatadist._cluster.link_changes.LinkChanges": "aclose close dropped",
    "aiodatadist._cluster.peer.Peer": "address check cluster_id notify unlink wait_closed",
    "aiodatadist._concurrency.completion.Completion": (
        "add_done_callback cancel is_cancelled is_done join quiesce_seconds state"
    ),
    "aiodatadist._concurrency.completion.TransferReport": "bytes queue_seconds ranges transfer_seconds",
    "aiodatadist._concurrency.coroutine.StartedCoroutine": "close done send throw",
    "aiodatadist._config.llm_config.LLMConfig": (
        "auth_key buf_pool_cfg cluster_info deploy_res_path device device_id enable_cache_manager "
        "enable_remote_cache_accessible enable_switch_role from_options ge_options gen_options generate_options "
        "global_resource_config heartbeat_interval heartbeat_misses host_mem_pool_cfg link_retry_count link_total_time "
        "links_have_owners listen listen_address listen_ip_info local_comm_res mem_pool_cfg mem_utilization model_config "
        "options output_max_size peer_quotas plain_networks quotas rdma_service_level rdma_traffic_class relink "
        "relink_policy sync_kv_timeout tcp_plain_networks tcp_streams tcp_threads transfer_backend "
        "transfer_checksum transport trust"
    ),
    "aiodatadist._config.option_rules.JsonOption": "model_config parse",
    "aiodatadist._config.option_rules.PoolConfig": "memory_size page page_shift pages populate",
    "aiodatadist._config.quotas.Quotas": (
        "caches channels checksum_caches critical_requests critical_share early_claims frame_bytes frames look_ups "
        "note_bytes notes released_names request_blocks requests revocations tensors unproved unproved_of_one "
        "unproved_per_second want_blocks wants"
    ),
    "aiodatadist._config.relink_policy.RelinkPolicy": "delay duration first_delay max_delay wait",
    "aiodatadist._context_caching.cache.ContextCache": (
        "aclose check_health check_registered exists exists_values figures load load_values match_prefix observer open "
        "register_kvcache remove remove_values save save_values start_load start_load_values start_save start_save_values "
        "statistics unregister_kvcache"
    ),
    "aiodatadist._context_caching.calls.CacheFigures": "calls incidents is_used pool statistics",
    "aiodatadist._context_caching.ems.CcKvOption": "read_local_only seconds timeout write_rcache",
    "aiodatadist._context_caching.ems.ContextCache_v1": (
        "async_load async_save exists get_result is_ready load register_kvcache remove save unregister_kvcache"
    ),
    "aiodatadist._context_caching.ems.ContextCaching": "async_load async_save load remove save",
    "aiodatadist._context_caching.ems.Ems": "check_health get_cc init shutdown",
    "aiodatadist._context_caching.ems.EmsConfig": "access_id access_key cc_cache cc_config cc_config_v1 chosen pool",
    "aiodatadist._context_caching.ems.future.CcFuture": "cancel done result stop",
    "aiodatadist._context_caching.errors.EmsException": "default_code message partial status_code",
    "aiodatadist._context_caching.health_gate.HealthGate": "failed give is_open probed rules take",
    "aiodatadist._context_caching.health_gate.HealthRules": "changes probe_every successes window",
    "aiodatadist._context_caching.identity.config.CcCacheConfig": "bytes_in_flight fill_on_read read_cache_bytes",
    "aiodatadist._context_caching.identity.config.CcConfig": "device_id model_id pp_world_size rank_id tp_world_size",
    "aiodatadist._context_caching.identity.config.CcConfig_v1": "kvcache_type llm_engine rank_in_pp_group rank_in_tp_group",
    "aiodatadist._context_caching.identity.names.PrimaryKey": "attribute_key distribute_key",
    "aiodatadist._context_caching.memory.kv_layout.LayerGroup": "layers name",
    "aiodatadist._context_caching.memory.regions.KvBufferWrapper": "data_ptr from_buffer length",
    "aiodatadist._context_caching.pools.contract.KVPool": (
        "aclose capabilities exists_many get_many healthy keeps nodes put_many remove_many stage why_no_room"
    ),
    "aiodatadist._context_caching.pools.embedded.MemoryPool": (
        "aclose capabilities capacity evicted exists_many get_many healthy keeps nodes open put_many remove_many stage "
        "why_no_room"
    ),
    "aiodatadist._context_caching.results.CcResult": "details of success total",
    "aiodatadist._context_caching.results.Statistics": (
        "bytes_in_flight damaged failed forged loaded loaded_bytes local missed most_bytes_in_flight present rejected saved "
        "saved_bytes"
    ),
    "aiodatadist._context_caching.transfer.handle.BlockTransfer": (
        "add_done_callback cancelled done error is_asked_to_stop outcome quiesce_seconds quiesced result seconds what"
    ),
    "aiodatadist._counting.figures.Figures": (
        "answers_late budget_refusals budget_waits caches certificates claims_refused cluster_id credentials failure_causes "
        "incidents leases leases_ended leases_opened link_changes_dropped linking links links_ended links_made "
        "messages_repeated own_certificate pools quotas relinking relinks_given_up transfers"
    ),
    "aiodatadist._counting.figures.FlowFigures": (
        "by_bytes by_queue_seconds by_seconds bytes ended failed_bytes queue_seconds ranges running seconds statuses "
        "succeeded"
    ),
    "aiodatadist._counting.observer.Call": "age_seconds cluster_id keys kind operation peer",
    "aiodatadist._counting.observer.Ended": "bytes error hits queue_seconds ranges status transfer_seconds",
    "aiodatadist._counting.observer.Observer": "began",
    "aiodatadist._datadist.LLMDataDist": (
        "cache_manager check_link_status cluster_id config device figures finalize init instance link link_changes "
        "link_clusters link_to listen_address notifications notify observer query_register_mem_status role runtime "
        "statistics switch_role unlink unlink_clusters unlink_from wait_link_closed wait_linked wait_register_mem_status"
    ),
    "aiodatadist._datadist.Statistics": "caches links pools",
    "aiodatadist._layered.synchronizers.AwaitableLayerSynchronizer": "fail num_layers ready synchronize_layer",
    "aiodatadist._layered.synchronizers.EventLayerSynchronizer": "gate num_layers record seconds synchronize_layer",
    "aiodatadist._layered.synchronizers.LayerSynchronizer": "synchronize_layer",
    "aiodatadist._layered.synchronizers.TorchNpuLayerSynchronizer": "device_event ready",
    "aiodatadist._layered.transfer.LayerDone": "cluster_id config_index layer_index seconds",
    "aiodatadist._hixl.engine.Hixl": (
        "cluster connect deregister_mem disconnect finalize get_notifies initialize name notifications register_mem "
        "send_notify transfer"
    ),
    "aiodatadist._hixl.values.MemDesc": "addr len",
    "aiodatadist._hixl.values.MemType": "placement",
    "aiodatadist._hixl.values.NotifyDesc": "name notify_msg",
    "aiodatadist._hixl.values.TransferOpDesc": "len local_addr remote_addr",
    "aiodatadist._legacy.config.LLMConfig": "enable_cache_manager enable_remote_cache_accessible from_options",
    "aiodatadist._legacy.datadist.LLMDataDist": (
        "add_model cache_manager check_capacity check_link_status complete_request finalize init kv_cache_manager link "
        "link_clusters link_to query_register_mem_status switch_role unlink unlink_clusters unlink_from "
        "wait_register_mem_status"
    ),
    "aiodatadist._legacy.kv_cache.KvCache": "create_cpu_cache per_device_tensor_addrs",
    "aiodatadist._legacy.kv_cache_manager.KvCacheManager": (
        "allocate_blocks_cache allocate_cache arrays check_cache_key copy_blocks copy_cache deallocate_cache "
        "get_cache_tensors is_initialized pool_usage pull_blocks pull_cache remove_cache_key swap_blocks tensors "
        "transfer_cache_async"
    ),
    "aiodatadist._legacy.model.LLMModel": (
        "capacity close complete merge_kv model_id open predict preload_prompt_prefix pull_blocks pull_kv "
        "release_prompt_prefix"
    ),
    "aiodatadist._legacy.model_config.ModelConfig": (
        "enable_page_attention enable_shared_system_prefix ge_options generate_options is_flow_model kv_dtypes "
        "kv_seq_len_dim_index kv_shapes kv_tensor_format model_config om_paths"
    ),
    "aiodatadist._legacy.requests.CapacityState": "free_tokens_num is_available total_tokens_num",
    "aiodatadist._legacy.requests.LLMReq": (
        "decoder_cluster_id has_prefix is_idle prefix_id prompt_cluster_id prompt_length req_id"
    ),
    "aiodatadist._legacy.runner.ModelRunner": "on_cache_allocated on_cache_deallocated run_model",
    "aiodatadist._legacy.tensor.Tensor": "copied from_tensor_tuple numpy tensor_desc",
    "aiodatadist._legacy.tensor.TensorDesc": "dtype nbytes shape",
    "aiodatadist._link.control.block_leases.BlockLease": (
        "add_done_callback blocks ended name refused renew ticket wait_ended withdraw"
    ),
    "aiodatadist._link.control.layer_events.LayerReceiver": "landed layer",
    "aiodatadist._link.control.notifications.Notification": "cluster_id generation payload",
    "aiodatadist._link.data.statistics.LinkStatistics": (
        "certificate_seconds cluster_id credential failures generation longest_seconds pulled_bytes pushed_bytes running "
        "served_bytes state transfer_seconds transfers transport"
    ),
    "aiodatadist._testing.faults.SoftHold": "arrived release",
    "aiodatadist._testing.ledger.BlockLedger": (
        "begin blocks checked landed piece reclaim settle settle_open strays tensors write write_as wrong"
    ),
    "aiodatadist._testing.ledger.BlockStamp": "block content generation owner read tensor version",
    "aiodatadist._testing.pairs.Cluster": "blocks contiguous datadist memories memory",
    "aiodatadist._testing.proxy.ChaosProxy": (
        "add address chance changed connections down find heal passed remove reset under upstream"
    ),
    "aiodatadist._testing.toxics.Bandwidth": "bytes_per_second",
    "aiodatadist._testing.toxics.Latency": "jitter seconds",
    "aiodatadist._testing.toxics.LimitData": "nbytes",
    "aiodatadist._testing.toxics.ResetPeer": "seconds",
    "aiodatadist._testing.toxics.Slicer": "average seconds variation",
    "aiodatadist._testing.toxics.SlowClose": "seconds",
    "aiodatadist._testing.toxics.Timeout": "seconds",
    "aiodatadist._testing.toxics._OfAShare": "share",
    "aiodatadist._values.cluster_info.LLMClusterInfo": (
        "append_local_ip_info append_remote_ip_info local_ip_info_list remote_addresses remote_cluster_id "
        "remote_ip_info_list remote_role_type"
    ),
    "aiodatadist._values.descriptors.BlocksCacheKey": "cluster_id model_id prompt_cluster_id",
    "aiodatadist._values.descriptors.Cache": "cache_desc cache_id create_cpu_cache home is_blocks_cache tensor_addrs",
    "aiodatadist._values.descriptors.CacheDesc": (
        "batch_dim batch_size data_type kv_tensor_format num_tensors placement seq_len_dim_index shape size stride "
        "update_dim"
    ),
    "aiodatadist._values.descriptors.CacheKey": (
        "cluster_id for_cluster is_placeholder is_prefix model_id prefix_id prompt_cluster_id req_id"
    ),
    "aiodatadist._values.descriptors.CacheKeyByIdAndIndex": "batch_index cache_id cluster_id",
    "aiodatadist._values.descriptors.DataType": "itemsize",
    "aiodatadist._values.descriptors.MemInfo": "addr mem_type size",
    "aiodatadist._values.descriptors.Status": "is_ok status_code",
    "aiodatadist._values.lease_ticket.LeaseTicket": "blocks cache_id cluster_id key lease model_config of seconds",
    "aiodatadist._values.link_results.LinkResults": "errors of status statuses",
    "aiodatadist._values.selection.BlockParts": "dst nbytes src",
    "aiodatadist._values.transfer_config.TransferConfig": "dst_addrs dst_cluster_id src_batch_index src_layer_range",
    "aiodatadist._values.transfer_config.TransferWithCacheKeyConfig": (
        "cache_key dst_cluster_id dst_layer_range src_batch_index src_layer_range"
    ),
    "aiodatadist._values.transfer_config._Destination": "dst_cluster_id src_layer_range",
    "aiodatadist.errors.DataCorrupted": "blocks digests",
    "aiodatadist.errors.DeviceError": "code",
    "aiodatadist.errors.LLMException": "default_status hint landed_blocks operation peer retryable status_code with_status",
    "aiodatadist.errors.LLMStatusCode": "of",
    "aiodatadist.errors.LinkError": "is_proved",
    "aiodatadist.telemetry.otel.SpanObserver": "began",
    "aiodatadist.telemetry.prometheus.Cache": "figures",
    "aiodatadist.telemetry.prometheus.Cluster": "figures",
    "aiodatadist.telemetry.prometheus.MetricsCollector": "add collect describe remove",
    "aiodatadist.testing.pools.FullPoolContract": "open_small_pool",
    "aiodatadist.testing.pools.PoolContract": "all_is_back lendable open_pool",
}
