"""Configuration: refused where it is said, and the same on both sides of the option dictionary."""

from __future__ import annotations

import inspect
import ipaddress
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretBytes

from aiodatadist import (
    FeatureNotEnabled,
    LLMConfig,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    Quotas,
    RelinkPolicy,
    blocking,
)
from aiodatadist._config.llm_config import check_mode
from aiodatadist._config.option_rules import MAX_LOCAL_COMM_RES, BufferPoolConfig, PoolConfig
from aiodatadist._config.remarks import remarks
from aiodatadist._transport import TRANSPORTS
from aiodatadist._values.addresses import parse_address

INT32 = st.integers(0, 2**31 - 1)

MIB = 1 << 20


def power_of_two(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high).map(lambda shift: 1 << shift)


pool_texts = st.builds(
    lambda shift, pages, rest: json.dumps({"memory_size": (pages << shift) + rest, "page_shift": shift}),
    st.integers(10, 30),
    st.integers(1, 2**32 - 2),
    st.integers(0, 1023),
)
cluster_texts = st.builds(
    lambda ips: json.dumps({"cluster_id": 1, "listen_ip_info": [{"ip": str(ip), "port": 26000} for ip in ips]}),
    st.lists(st.ip_addresses(v=4)),
)
engine_keys = st.text("abc.XYZ", max_size=8).map("ge.{}".format)

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "device_id": INT32,
    "listen_ip_info": st.sampled_from(["127.0.0.1:0", "0.0.0.0:26000", "[::1]:65535", "not an address", ""]),
    "sync_kv_timeout": st.integers(1, 2**31 - 1),
    "enable_remote_cache_accessible": st.booleans(),
    "link_total_time": st.integers(0, 2**32 - 1),
    "link_retry_count": st.integers(1, 100),
    "local_comm_res": st.sampled_from(["", "{}", '{"version": "1.0"}']),
    "mem_pool_cfg": pool_texts | st.just(""),
    "host_mem_pool_cfg": pool_texts,
    "rdma_traffic_class": st.integers(0, 63).map(lambda n: 4 * n),
    "rdma_service_level": st.integers(0, 7),
    "global_resource_config": st.sampled_from(["{}", '{"a": [1]}']),
    "ge_options": st.dictionaries(engine_keys, st.text(max_size=5), max_size=3),
    "enable_switch_role": st.booleans(),
    "mem_utilization": st.floats(0, 1),
    "buf_pool_cfg": st.sampled_from(["", '{"buf_pool_size": 1}']),
    "deploy_res_path": st.text(max_size=5),
    "cluster_info": cluster_texts | st.just(""),
    "output_max_size": st.integers(0, 2**63 - 1),
    "transport": st.sampled_from(["hccl", "loopback"]),
    "tcp_streams": st.integers(1, 32),
    "tcp_threads": st.integers(1, 16),
    "tcp_plain_networks": st.sampled_from(["", "10.0.0.0/8", "10.1.0.0/16, fd00::/8"]),
    "heartbeat_interval": st.floats(0.01, 600),
    "heartbeat_misses": st.integers(1, 100),
    "relink": st.sampled_from(["{}", '{"wait": 1.5, "duration": null}', ""]),
    "transfer_checksum": st.booleans(),
    "quotas": st.sampled_from(["{}", '{"frames": 1000, "critical_share": 0.5}', ""]),
}

configurations = st.fixed_dictionaries({}, optional=OPTIONS)
"""Any options that go together, but for auth_key."""


def test_spellings_of_the_class_are_one_class() -> None:
    assert blocking.LlmConfig is blocking.LLMConfig


def test_defaults_are_those_of_the_one_sided_mode() -> None:
    assert LLMConfig().generate_options() == {
        "ge.exec.deviceId": "0",
        "ge.session_device_id": "0",
        "llm.SyncKvCacheWaitTime": "1000",
        "llm.EnableCacheManager": "1",
        "llm.EnableRemoteCacheAccessible": "1",
        "llm.LinkTotalTime": "0",
        "llm.LinkRetryCount": "1",
        "llm.MemoryUtilization": "0.95",
    }


@given(configurations)
def test_options_and_back_is_the_same_configuration(values: dict[str, Any]) -> None:
    config = LLMConfig(**values)
    options = config.generate_options()
    assert all(isinstance(text, str) for text in options.values())
    assert LLMConfig.from_options(options) == config
    upper = {key if key in config.ge_options else key.upper(): text for key, text in options.items()}
    assert LLMConfig.from_options(upper) == config


@given(configurations)
def test_set_later_is_the_same_as_set_at_once(values: dict[str, Any]) -> None:
    config = LLMConfig()
    for name, value in values.items():
        setattr(config, name, value)
    assert config == LLMConfig(**values)


def test_every_option_is_covered_by_the_round_trip() -> None:
    apart = {"auth_key", "trust", "enable_cache_manager", "transfer_backend"}
    assert OPTIONS.keys() | apart == LLMConfig.model_fields.keys()


@pytest.mark.parametrize(
    "values",
    [
        {"enable_cache_manager": False},
        {"enable_cache_manager": False, "enable_remote_cache_accessible": False},
        {"transfer_backend": "hixl", "listen_ip_info": "127.0.0.1:1"},
    ],
)
def test_modes_and_back_are_the_same_configuration(values: dict[str, Any]) -> None:
    assert LLMConfig.from_options(LLMConfig(**values).generate_options()) == LLMConfig(**values)


def test_dictionary_is_a_fresh_one_each_time() -> None:
    config = LLMConfig(ge_options={"ge.a": "1"})
    for options in (config.generate_options(), config.gen_options(), config.options):
        assert options == {"ge.a": "1", **LLMConfig().generate_options()}
        options["ge.a"] = options["llm.LinkRetryCount"] = "7"
    assert config.ge_options == {"ge.a": "1"}
    assert config.generate_options()["llm.LinkRetryCount"] == "1"


def test_everything_set_is_in_the_dictionary_under_its_key() -> None:
    config = LLMConfig(
        device_id=1,
        listen_ip_info="127.0.0.1:26000",
        sync_kv_timeout=250,
        enable_remote_cache_accessible=False,
        link_total_time=2,
        link_retry_count=3,
        local_comm_res="{}",
        mem_pool_cfg='{"memory_size": 1048576}',
        host_mem_pool_cfg='{"memory_size": 65536}',
        rdma_traffic_class=132,
        rdma_service_level=4,
        global_resource_config="[]",
        ge_options={"ge.flowGraphMemMaxSize": "1000"},
        enable_switch_role=True,
        mem_utilization=0.5,
        buf_pool_cfg='{"buf_pool_size": 1}',
        deploy_res_path="/opt",
        cluster_info='{"listen_ip_info": [{"ip": "1.2.3.4", "port": 1}]}',
        output_max_size=7,
        transport="loopback",
        tcp_streams=8,
        tcp_threads=1,
        tcp_plain_networks="10.1.0.0/16, 10.2.0.0/16",
        heartbeat_interval=0.1,
        heartbeat_misses=5,
        relink=RelinkPolicy(max_delay=2, wait=0.5),
        transfer_checksum=True,
        quotas=Quotas(frames=500),
        auth_key=b"secret",
    )
    assert config.generate_options() == {
        "ge.flowGraphMemMaxSize": "1000",
        "ge.exec.deviceId": "1",
        "ge.session_device_id": "1",
        "llm.listenIpInfo": "127.0.0.1:26000",
        "llm.SyncKvCacheWaitTime": "250",
        "llm.EnableCacheManager": "1",
        "llm.EnableRemoteCacheAccessible": "0",
        "llm.LinkTotalTime": "2",
        "llm.LinkRetryCount": "3",
        "llm.LocalCommRes": "{}",
        "llm.MemPoolConfig": '{"memory_size": 1048576}',
        "llm.HostMemPoolConfig": '{"memory_size": 65536}',
        "llm.RdmaTrafficClass": "132",
        "llm.RdmaServiceLevel": "4",
        "llm.GlobalResourceConfig": "[]",
        "llm.EnableSwitchRole": "1",
        "llm.MemoryUtilization": "0.5",
        "llm.BufPoolCfg": '{"buf_pool_size": 1}',
        "llm.deployResPath": "/opt",
        "llm.ClusterInfo": '{"listen_ip_info": [{"ip": 67305985, "port": 1}]}',  # 0x04030201
        "llm.OutputMaxSize": "7",
        "aiodatadist.Transport": "loopback",
        "aiodatadist.TcpStreams": "8",
        "aiodatadist.TcpThreads": "1",
        "aiodatadist.TcpPlainNetworks": "10.1.0.0/16,10.2.0.0/16",
        "aiodatadist.HeartbeatInterval": "0.1",
        "aiodatadist.HeartbeatMisses": "5",
        "aiodatadist.Relink": '{"max_delay":2.0,"wait":0.5}',
        "aiodatadist.TransferChecksum": "1",
        "aiodatadist.Quotas": '{"frames":500}',
    }


def test_empty_address_is_no_address_and_empty_resource_is_said() -> None:
    options = LLMConfig(listen_ip_info="", local_comm_res="").generate_options()
    assert "llm.listenIpInfo" not in options
    assert options["llm.LocalCommRes"] == ""


def test_one_device_in_a_list_is_that_device() -> None:
    assert LLMConfig(**_any(device_id=[3])).device_id == 3
    assert LLMConfig(**_any(device_id=(3,))).device_id == 3
    assert LLMConfig(**_any(device_id=[0, 1, 2])).device_id == [0, 1, 2]


def test_milliseconds_may_be_digits() -> None:
    assert LLMConfig(**_any(sync_kv_timeout="250")).generate_options()["llm.SyncKvCacheWaitTime"] == "250"


def test_listen_is_another_name_of_listen_ip_info() -> None:
    assert LLMConfig(**_any(listen="127.0.0.1:26000")).listen_ip_info == "127.0.0.1:26000"


UNSET_BY_DEFAULT = [
    "listen_ip_info", "local_comm_res", "mem_pool_cfg", "host_mem_pool_cfg", "rdma_traffic_class", "rdma_service_level",
    "transfer_backend", "global_resource_config", "buf_pool_cfg", "deploy_res_path", "cluster_info", "output_max_size",
    "relink", "quotas", "trust", "auth_key", "tcp_plain_networks",
]  # fmt: skip


@pytest.mark.parametrize("name", UNSET_BY_DEFAULT)
def test_what_is_unset_by_default_can_be_unset(name: str) -> None:
    config = LLMConfig(**_any(**{name: None}))
    assert getattr(config, name) is None
    setattr(config, name, None)
    assert config == LLMConfig()


@pytest.mark.parametrize(
    "name",
    [
        "listen_ip_info",
        "mem_pool_cfg",
        "host_mem_pool_cfg",
        "buf_pool_cfg",
        "deploy_res_path",
        "cluster_info",
        "relink",
        "quotas",
        "tcp_plain_networks",
    ],
)
def test_empty_text_is_unset(name: str) -> None:
    assert LLMConfig(**_any(**{name: ""})) == LLMConfig()


WRONG_TYPES: list[tuple[str, object]] = [
    ("device_id", "0"),
    ("device_id", None),
    ("device_id", ["0"]),
    ("device_id", 1.0),
    ("listen_ip_info", 26000),
    ("sync_kv_timeout", 1.5),
    ("sync_kv_timeout", None),
    ("enable_cache_manager", 1),
    ("enable_remote_cache_accessible", "1"),
    ("link_total_time", "1"),
    ("link_total_time", 1.0),
    ("link_retry_count", None),
    ("local_comm_res", {}),
    ("mem_pool_cfg", [("memory_size", 1048576)]),
    ("mem_pool_cfg", 1048576),
    ("host_mem_pool_cfg", b"{}"),
    ("rdma_traffic_class", "132"),
    ("rdma_service_level", 4.0),
    ("transfer_backend", 1),
    ("global_resource_config", {}),
    ("ge_options", [("ge.a", "1")]),
    ("ge_options", {"ge.a": 1}),
    ("ge_options", {1: "1"}),
    ("ge_options", {"ge.flowGraphMemMaxSize": 1000}),
    ("enable_switch_role", 0),
    ("mem_utilization", "0.5"),
    ("mem_utilization", True),
    ("mem_utilization", None),
    ("buf_pool_cfg", []),
    ("deploy_res_path", 1),
    ("cluster_info", {}),
    ("output_max_size", "1"),
    ("transport", 1),
    ("tcp_streams", "4"),
    ("tcp_threads", 2.0),
    ("tcp_plain_networks", ["10.0.0.0/8"]),
    ("heartbeat_interval", "1"),
    ("heartbeat_interval", True),
    ("heartbeat_interval", None),
    ("heartbeat_misses", "3"),
    ("relink", True),
    ("relink", 1.0),
    ("transfer_checksum", 1),
    ("quotas", 1),
    ("trust", 1),
    ("auth_key", 1),
]

BROKEN_RULES = [
    ("device_id", -1, "device_id is -1: must be at least 0"),
    ("device_id", [], "device_id is []: exactly one"),
    ("sync_kv_timeout", 0, "sync_kv_timeout is 0: must be above 0"),
    ("sync_kv_timeout", "0", "sync_kv_timeout is 0: must be above 0"),
    ("sync_kv_timeout", "abc", "sync_kv_timeout is 'abc': must be digits"),
    ("sync_kv_timeout", "-1", "sync_kv_timeout is '-1': must be digits"),
    ("sync_kv_timeout", "", "sync_kv_timeout is '': must be digits"),
    ("link_total_time", -1, "link_total_time is -1: must be in [0, 4294967295]"),
    ("link_total_time", 2**32, "link_total_time is 4294967296: must be in [0, 4294967295]"),
    ("link_retry_count", 0, "link_retry_count is 0: must be in [1, 100]"),
    ("link_retry_count", 101, "link_retry_count is 101: must be in [1, 100]"),
    ("local_comm_res", "{", "local_comm_res is not JSON"),
    ("local_comm_res", "[" * 60000, "local_comm_res is not JSON"),
    ("local_comm_res", " " * (MAX_LOCAL_COMM_RES + 1), "local_comm_res has 65537 characters: the limit is 65536"),
    ("sync_kv_timeout", "\u0663", "must be digits"),
    ("mem_pool_cfg", {"memory_size": 0}, "mem_pool_cfg: memory_size is 0: must be greater than 0"),
    ("mem_pool_cfg", {"memory_size": "1 MB"}, "memory_size is '1 MB': must be a number of bytes"),
    ("host_mem_pool_cfg", {"page_shift": 16}, "host_mem_pool_cfg: memory_size is missing"),
    ("host_mem_pool_cfg", {"memory_size": 1048576, "page_shift": 31}, "page_shift is 31: must be less than 31"),
    ("host_mem_pool_cfg", {"memory_size": 1048576, 1: 2}, "host_mem_pool_cfg: 1 is "),
    ("buf_pool_cfg", {}, "buf_pool_cfg: buf_cfg is missing"),
    ("mem_pool_cfg", "[]", "mem_pool_cfg: the text is []: must be an object"),
    ("mem_pool_cfg", "1MiB", "; write an object with these fields: memory_size, page_shift"),
    ("mem_pool_cfg", "{", "mem_pool_cfg: the text is '{': Invalid JSON"),
    ("mem_pool_cfg", '{"page_shift": 16}', "mem_pool_cfg: memory_size is missing"),
    ("mem_pool_cfg", '{"memory_size": 1048576, "pages": 1}', "mem_pool_cfg: pages is 1: there is no such field"),
    (
        "mem_pool_cfg",
        '{"memory_size": 1048576, "page_shift": 9}',
        "page_shift is 9: must be greater than or equal",
    ),
    ("mem_pool_cfg", '{"memory_size": 1048576, "page_shift": 31}', "page_shift is 31: must be less than 31"),
    ("mem_pool_cfg", '{"memory_size": 0}', "mem_pool_cfg: memory_size is 0: must be greater than 0"),
    ("mem_pool_cfg", '{"memory_size": -1}', "mem_pool_cfg: memory_size is -1: must be greater than 0"),
    ("mem_pool_cfg", '{"memory_size": true}', "mem_pool_cfg: memory_size is True: must be a number of bytes"),
    ("mem_pool_cfg", '{"memory_size": 65536.0}', "memory_size is 65536.0: must be a number of bytes"),
    ("host_mem_pool_cfg", '{"memory_size": 65535}', "host_mem_pool_cfg: memory_size is 65535: must be at least"),
    ("host_mem_pool_cfg", json.dumps({"memory_size": (2**32 - 1) << 16}), "fewer than 4294967295"),
    ("host_mem_pool_cfg", json.dumps({"memory_size": 2**64, "page_shift": 30}), "must be less than 1844674407370"),
    ("transfer_backend", "nixl", "transfer_backend is 'nixl': must be hixl"),
    ("transfer_backend", "", "transfer_backend is '': must be hixl"),
    ("global_resource_config", " " * 65537, "global_resource_config has 65537 characters: the limit is 65536"),
    ("device_id", [0, -1], "device_id is -1: must be at least 0"),
    ("ge_options", {"x.Role": "1"}, "ge_options has 'x.Role': its keys must begin with 'ge.' or 'llm.'"),
    ("ge_options", {"ge.exec.deviceId": "0,1"}, "is '0,1': must be the number of a device"),
    ("ge_options", {"ge.exec.deviceId": "0", "ge.session_device_id": "1"}, "exactly one device"),
    ("mem_utilization", 1.01, "mem_utilization is 1.01: must be in [0.0, 1.0]"),
    ("mem_utilization", -0.1, "mem_utilization is -0.1"),
    ("mem_utilization", float("nan"), "mem_utilization is nan"),
    ("buf_pool_cfg", "{}", "buf_pool_cfg: buf_cfg is missing"),
    ("buf_pool_cfg", '{"buf_cfg": []}', "buf_pool_cfg: buf_cfg is []"),
    ("buf_pool_cfg", '{"buf_pool_size": 0}', "buf_pool_cfg: buf_pool_size is 0: must be greater than 0"),
    ("cluster_info", "[]", "cluster_info is []: must be a JSON object"),
    ("cluster_info", "{", "cluster_info is not JSON"),
    ("cluster_info", '{"listen_ip_info": {}}', "cluster_info: listen_ip_info is {}: must be a list"),
    ("cluster_info", '{"listen_ip_info": [{}]}', "listen_ip_info[0] is {}: must be an object with an ip"),
    ("cluster_info", '{"listen_ip_info": [{"ip": "::1"}]}', "listen_ip_info[0].ip is '::1': must be an IPv4"),
    ("cluster_info", '{"listen_ip_info": [{"ip": -1}]}', "listen_ip_info[0].ip is -1: must be an IPv4"),
    ("output_max_size", -1, "output_max_size is -1: must be in [0, 9223372036854775807]"),
    ("transport", "udp", "transport is 'udp': must be auto or hccl or loopback or tcp"),
    ("tcp_streams", 0, "tcp_streams is 0: must be in [1, 32]"),
    ("tcp_streams", 33, "tcp_streams is 33: must be in [1, 32]"),
    ("tcp_threads", 17, "tcp_threads is 17: must be in [1, 16]"),
    ("tcp_plain_networks", "10.1.0.1/16", "tcp_plain_networks has '10.1.0.1/16': must be networks such as 10.1.0.0/16"),
    ("tcp_plain_networks", "a.example", "tcp_plain_networks has 'a.example': must be networks"),
    ("tcp_plain_networks", ",".join(["10.0.0.0/8"] * 65), "tcp_plain_networks has 65 networks: the limit is 64"),
    ("heartbeat_interval", 0.009, "heartbeat_interval is 0.009: must be in [0.01, 600] seconds"),
    ("heartbeat_interval", 2000, "heartbeat_interval is 2000: must be in [0.01, 600] seconds"),
    ("heartbeat_interval", float("nan"), "heartbeat_interval is nan: must be in [0.01, 600] seconds"),
    ("heartbeat_misses", 0, "heartbeat_misses is 0: must be in [1, 100]"),
    ("heartbeat_misses", 101, "heartbeat_misses is 101: must be in [1, 100]"),
    ("relink", "true", "relink: the text is True: must be an object"),
    ("relink", {"first_delay": 0}, "relink: first_delay is 0: must be greater than 0"),
    ("relink", {"first_delay": "1"}, "relink: first_delay is '1': must be a valid number"),
    ("relink", {"max_delay": 0.01}, "relink: max_delay is 0.01: must be at least first_delay, 0.02"),
    ("relink", {"duration": -1}, "relink: duration is -1: must be greater than 0"),
    ("relink", {"duration": float("inf")}, "relink: duration is inf: must be a finite number"),
    ("relink", {"wait": float("nan")}, "relink: wait is nan: must be a finite number"),
    ("relink", {"wait": 864_001}, "relink: wait is 864001: must be less than or equal to 864000"),
    ("relink", {"retries": 3}, "relink: retries is 3: there is no such field"),
    ("quotas", "[]", "quotas: the text is []: must be an object"),
    ("quotas", {"frames": 99}, "quotas: frames is 99: must be greater than or equal to 100"),
    ("quotas", {"notes": 63}, "quotas: notes is 63: must be greater than or equal to 64"),
    ("quotas", {"unproved": 65_537}, "quotas: unproved is 65537: must be less than or equal to 65536"),
    ("quotas", {"critical_share": 1.5}, "quotas: critical_share is 1.5: must be less than or equal to 1"),
    ("quotas", {"caches": "9"}, "quotas: caches is '9': must be a valid integer"),
    ("quotas", {"frame": 1}, "quotas: frame is 1: there is no such field"),
    ("auth_key", b"", "auth_key is empty: a key has at least 1 byte"),
    ("auth_key", SecretBytes(b""), "auth_key is empty"),
]

OUTSIDE_THE_C_TYPE = [
    ("device_id", 2**31, "device_id is 2147483648: the int32 range"),
    ("sync_kv_timeout", 2**31, "sync_kv_timeout is 2147483648: the int32 range"),
    ("sync_kv_timeout", "2147483648", "sync_kv_timeout is 2147483648: the int32 range"),
    ("rdma_traffic_class", 2**32, "rdma_traffic_class is 4294967296: the uint32 range"),
    ("rdma_traffic_class", -4, "rdma_traffic_class is -4: the uint32 range"),
    ("rdma_service_level", -1, "rdma_service_level is -1: the uint32 range"),
    ("ge_options", {"ge.exec.deviceId": "2147483648"}, "device_id is 2147483648: the int32 range"),
]


KEPT: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "devices": ({"device_id": [0, 1]}, {"ge.exec.deviceId": "0;1", "ge.session_device_id": "0"}, "device_id is [0, 1]"),
    "devices of ge_options": ({"ge_options": {"ge.exec.deviceId": "2;3"}}, {"ge.exec.deviceId": "2;3"}, "is [2, 3]"),
    "pool": ({"ge_options": {"ge.flowGraphMemMaxSize": "1,2"}}, {"ge.flowGraphMemMaxSize": "1,2"}, "is '1,2': must"),
    "no pool": (
        {"ge_options": {"GE.FLOWGRAPHMEMMAXSIZE": ""}},
        {"GE.FLOWGRAPHMEMMAXSIZE": ""},
        "is '': must be digi",
    ),
    "no JSON": ({"global_resource_config": ""}, {"llm.GlobalResourceConfig": ""}, "global_resource_config is not JSON"),
    "half of it": (
        {"global_resource_config": "{"},
        {"llm.GlobalResourceConfig": "{"},
        "is not JSON: Expecting property",
    ),
}


@pytest.mark.parametrize(("options", "entries", "words"), KEPT.values(), ids=KEPT)
def test_what_only_init_refuses_is_kept_as_it_was_given(
    options: dict[str, Any], entries: dict[str, str], words: str
) -> None:
    config = LLMConfig(**options)
    assert entries.items() <= config.generate_options().items()
    for use in (lambda: check_mode(config), lambda: LLMConfig.from_options(config.generate_options())):
        with pytest.raises(ParamInvalid) as caught:
            use()
        assert words in str(caught.value)


def test_an_entry_of_ge_options_counts_unless_the_attribute_was_changed() -> None:
    config = LLMConfig(ge_options={"LLM.SyncKvCacheWaitTime": "500", "llm.LinkRetryCount": "3"})
    config.link_retry_count = 2
    read = LLMConfig.from_options(config.generate_options())
    assert (read.sync_kv_timeout, read.link_retry_count) == (500, 2)
    assert any("set sync_kv_timeout instead" in line for line in remarks(config))


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_wrong_type_is_a_type_error_that_names_the_option(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        LLMConfig(**_any(**{name: value}))


@pytest.mark.parametrize(("name", "value", "words"), BROKEN_RULES)
def test_broken_rule_is_param_invalid_with_value_and_limit(name: str, value: object, words: str) -> None:
    with pytest.raises(LLMException) as caught:
        LLMConfig(**_any(**{name: value}))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value", "words"), OUTSIDE_THE_C_TYPE)
def test_integer_outside_its_c_type_is_a_value_error(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as made:
        LLMConfig(**_any(**{name: value}))
    with pytest.raises(ValueError, match=f"^{words}") as changed:
        setattr(LLMConfig(), name, value)
    assert str(made.value).count("\n") == str(changed.value).count("\n") == 0, "one sentence"


@pytest.mark.parametrize(
    ("name", "value"), WRONG_TYPES + [case[:2] for case in BROKEN_RULES] + [case[:2] for case in OUTSIDE_THE_C_TYPE]
)
def test_refused_setting_changes_nothing(name: str, value: object) -> None:
    config = LLMConfig(sync_kv_timeout=250, listen_ip_info="127.0.0.1:1", local_comm_res="{}", ge_options={"ge.a": "b"})
    before = config.model_copy(deep=True)
    with pytest.raises((TypeError, ValueError, LLMException)):
        setattr(config, name, value)
    assert config == before


def test_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="lisen"):
        LLMConfig(**_any(lisen="127.0.0.1:0"))
    with pytest.raises(ValueError, match=r"^LLMConfig has no option 'lisen'$"):
        setattr(LLMConfig(), "lisen", "127.0.0.1:0")  # noqa: B010 - mypy sees through an assignment


@pytest.mark.parametrize("key", ["llm.DeviceId", "ge.exec.deviceId", "LLM.DEVICEID", "ge.session_device_id"])
def test_device_has_several_spellings_without_case(key: str) -> None:
    assert LLMConfig.from_options({key: "3"}).device_id == 3


@pytest.mark.parametrize("key", ["llm.listenIpInfo", "llm.ListenIpInfo"])
def test_listening_has_two_spellings(key: str) -> None:
    assert LLMConfig.from_options({key: "127.0.0.1:1"}).listen_ip_info == "127.0.0.1:1"


def test_option_said_twice_has_to_be_the_same() -> None:
    assert LLMConfig.from_options({"llm.DeviceId": "3", "ge.exec.deviceId": "3"}).device_id == 3
    with pytest.raises(ParamInvalid, match=r"'ge\.exec\.deviceId' is '4': 'llm\.DeviceId' is the same option"):
        LLMConfig.from_options({"llm.DeviceId": "3", "ge.exec.deviceId": "4"})


def test_engine_options_that_are_not_known_are_kept_as_they_are_spelt() -> None:
    config = LLMConfig.from_options({"ge.resourceConfigPath": "/x", "GE.Exec.DeviceId": "2"})
    assert (config.ge_options, config.device_id) == ({"ge.resourceConfigPath": "/x"}, 2)


def test_explicit_device_wins_over_that_in_ge_options() -> None:
    other = {"GE.exec.deviceId": "5", "ge.a": "b"}
    config = LLMConfig(device_id=0, ge_options=other)
    later = LLMConfig()
    later.device_id = 0
    later.ge_options = other
    assert config.generate_options() == later.generate_options() == {"ge.a": "b", **LLMConfig().generate_options()}


def test_device_in_ge_options_is_the_device_while_none_was_set() -> None:
    config = LLMConfig(ge_options={"ge.session_device_id": "5"})
    assert (config.device_id, config.ge_options) == (5, {})
    config.ge_options = {"ge.exec.deviceId": "6"}
    assert config.generate_options()["ge.session_device_id"] == "6"
    config.device_id = 7
    config.ge_options = {"ge.exec.deviceId": "6"}
    assert config.generate_options()["ge.exec.deviceId"] == "7"


def test_dictionary_given_as_ge_options_stays_as_it_is() -> None:
    given = {"ge.exec.deviceId": "5"}
    config = LLMConfig(ge_options=given)
    config.ge_options["ge.a"] = "b"
    assert given == {"ge.exec.deviceId": "5"}
    assert LLMConfig().ge_options == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nonsense": "1"}, "option 'nonsense' is not known"),
        ({"llm.DeviceId": "one"}, "option 'llm.DeviceId' is 'one': must be a number"),
        ({"ge.exec.deviceId": "0;1"}, "device_id is [0, 1]: exactly one device belongs to a process"),
        ({"ge.exec.deviceId": "0;"}, "option 'ge.exec.deviceId' is '0;': must be a number, or several"),
        ({"ge.exec.deviceId": "0;1", "ge.session_device_id": "1"}, "'ge.exec.deviceId' is the same option"),
        ({"llm.GlobalResourceConfig": "{"}, "global_resource_config is not JSON"),
        ({"llm.LinkRetryCount": "9" * 5000}, "must be a number"),
        ({"llm.LinkRetryCount": "101"}, "link_retry_count is 101: must be in [1, 100]"),
        ({"llm.EnableCacheManager": "true"}, "option 'llm.EnableCacheManager' is 'true': must be '0' or '1'"),
        ({"llm.SyncKvCacheWaitTime": "abc"}, "sync_kv_timeout is 'abc': must be digits"),
        ({"llm.LinkRetryCount": "1_0"}, "option 'llm.LinkRetryCount' is '1_0': must be a number"),
        ({"llm.LinkRetryCount": "\u0663"}, "must be a number"),
        ({"llm.MemoryUtilization": "half"}, "'half': must be a number with a decimal point"),
        ({"llm.MemoryUtilization": "nan"}, "mem_utilization is nan"),
        ({"llm.TransferBackend": ""}, "transfer_backend is '': must be hixl"),
        ({"ge.flowGraphMemMaxSize": "1,2"}, "must be digits only"),
        ({"aiodatadist.AuthKey": "x"}, "option 'aiodatadist.AuthKey' is not known"),
    ],
)
def test_wrong_option_is_param_invalid_and_names_key_and_value(options: dict[str, str], words: str) -> None:
    with pytest.raises(ParamInvalid) as caught:
        LLMConfig.from_options(options)
    assert words in str(caught.value)


@pytest.mark.parametrize("options", [None, [("llm.DeviceId", "1")], {"llm.DeviceId": 1}, {1: "1"}])
def test_options_are_a_dictionary_of_strings(options: Any) -> None:
    with pytest.raises(TypeError):
        LLMConfig.from_options(options)


# ---- where to listen ----


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:26000", ("127.0.0.1", 26000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("localhost:1", ("localhost", 1)),
        ("prefill-0.prefill.default.svc.cluster.local.:26000", ("prefill-0.prefill.default.svc.cluster.local.", 26000)),
        ("node_7:0", ("node_7", 0)),
        ("3com.com:1", ("3com.com", 1)),
    ],
)
def test_address_is_ip_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "x") == address


@pytest.mark.parametrize(
    "text",
    ["", ":", "127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1:2", "127.0.0.1.5:1",
     "300.1.1.1:1", "1:1", "-a:1", "a-:1", "a..b:1", ".a:1", "a b:1", "[localhost]:1", "\u00fcber:1", "a" * 64 + ":1",
     "a." * 127 + ":1", "localhost", "localhost:", "user@host:1", "::1:80", "[::1]80", "[127.0.0.1]:1", "127.0.0.1: 1",
     "127.0.0.1:1.0", "127.0.0.1:" + "9" * 5000, "127.0.0.1:\u0663"],
)  # fmt: skip
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(
        ParamInvalid, match=r"^x is .*: must be ip:port, \[ipv6\]:port or name:port with a port in \[0, 65535\]"
    ):
        parse_address(text, "x")


@given(st.text("0123456789.:[]af%", max_size=20) | st.builds("{}:{}".format, st.ip_addresses(), st.integers(-1, 70000)))
def test_any_text_is_an_address_or_param_invalid(text: str) -> None:
    try:
        host, port = parse_address(text, "x")
    except ParamInvalid:
        return
    assert 0 <= port < 2**16
    if not re.search("[a-z]", host):  # else it may be the name of a host
        assert ipaddress.ip_address(host)


def test_network_address_needs_a_key() -> None:
    with pytest.raises(ParamInvalid, match="listening on a network needs auth_key"):
        _ = LLMConfig(listen_ip_info="0.0.0.0:1").listen_address
    assert LLMConfig(**_any(listen_ip_info="0.0.0.0:1", auth_key=b"a secret of 16 b")).listen_address == ("0.0.0.0", 1)
    assert LLMConfig(**_any(listen_ip_info="0.0.0.0:1", trust="/run/trust")).listen_address == ("0.0.0.0", 1)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1"])
def test_loopback_address_needs_no_key(text: str) -> None:
    assert LLMConfig(listen_ip_info=text).listen_address is not None


@pytest.mark.parametrize("text", [None, ""])
def test_without_an_address_a_cluster_does_not_listen(text: str | None) -> None:
    assert LLMConfig(listen_ip_info=text).listen_address is None


# ---- the rest ----


def test_mode_that_only_legacy_has_says_where_it_is() -> None:
    check_mode(LLMConfig())
    check_mode(LLMConfig(enable_remote_cache_accessible=False))
    with pytest.raises(FeatureNotEnabled, match=r"is not available here .*aiodatadist\.legacy\.LLMDataDist"):
        check_mode(LLMConfig(enable_cache_manager=False))


def test_local_resources_turn_both_modes_on_when_nothing_else_is_said() -> None:
    config = LLMConfig.from_options({"llm.LocalCommRes": ""})
    assert (config.enable_cache_manager, config.enable_remote_cache_accessible) == (True, True)


def test_backend_turns_both_modes_on_when_nothing_else_is_said() -> None:
    config = LLMConfig.from_options({"llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:1"})
    assert (config.enable_cache_manager, config.enable_remote_cache_accessible) == (True, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, "with llm.LocalCommRes it must be 1"),
        (
            {"llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:1", "llm.EnableCacheManager": "0"},
            "llm.EnableCacheManager is 0: with llm.TransferBackend it must be 1",
        ),
        (
            {"llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:1", "llm.EnableRemoteCacheAccessible": "0"},
            "llm.EnableRemoteCacheAccessible is 0: with llm.TransferBackend it must be 1",
        ),
        ({"llm.TransferBackend": "hixl"}, "llm.listenIpInfo is not set: with llm.TransferBackend it must be given"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ParamInvalid, match=words):
        LLMConfig.from_options(options)


def test_options_that_do_not_go_together_are_found_without_a_dictionary() -> None:
    with pytest.raises(ParamInvalid, match=r"with llm\.LocalCommRes it must be 1"):
        check_mode(LLMConfig(local_comm_res="", enable_cache_manager=False))


def test_addresses_in_cluster_info_become_little_endian_integers() -> None:
    config = LLMConfig(cluster_info='{"cluster_id": 1, "listen_ip_info": [{"ip": "1.2.3.4", "port": 5}, {"ip": 6}]}')
    wanted = {"cluster_id": 1, "listen_ip_info": [{"ip": 0x04030201, "port": 5}, {"ip": 6}]}
    assert json.loads(config.cluster_info or "") == wanted
    config.cluster_info = config.cluster_info
    assert json.loads(config.cluster_info or "") == wanted


def test_cluster_info_need_not_have_addresses() -> None:
    assert LLMConfig(cluster_info='{"cluster_id": 1}').cluster_info == '{"cluster_id": 1}'


# ---- pools ----


def test_pool_has_pages_of_64_kib_unless_said_otherwise() -> None:
    pool = PoolConfig.parse('{"memory_size": 1048577}', "mem_pool_cfg")
    assert (pool.page, pool.pages) == (65536, 16)


@pytest.mark.parametrize("name", ["mem_pool_cfg", "host_mem_pool_cfg"])
@pytest.mark.parametrize(
    "given",
    ['{"memory_size":1048576,"page_shift":10}', {"memory_size": 1048576, "page_shift": 10},
     PoolConfig(memory_size=1048576, page_shift=10)],
    ids=["text", "dict", "object"],
)  # fmt: skip
def test_pool_may_be_text_or_dict_or_object_and_is_kept_as_text(name: str, given: object) -> None:
    config = LLMConfig(**_any(**{name: given}))
    assert getattr(config, name) == '{"memory_size":1048576,"page_shift":10}'
    assert LLMConfig.from_options(config.generate_options()) == config
    other = LLMConfig()
    setattr(other, name, given)
    assert other == config


def test_what_a_pool_leaves_out_is_left_out_in_its_text() -> None:
    assert LLMConfig(mem_pool_cfg={"memory_size": 1048576}).mem_pool_cfg == '{"memory_size":1048576}'
    assert LLMConfig(buf_pool_cfg={"buf_pool_size": 1048576}).buf_pool_cfg == '{"buf_pool_size":1048576}'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_size": 0}, "memory_size is 0: must be greater than 0"),
        ({"memory_size": 65535}, "memory_size is 65535: must be at least a page, 65536 bytes"),
        ({"memory_size": 1048576, "page_shift": 9}, "page_shift is 9: must be greater than or equal to 10"),
        ({"memory_size": 1048576, "pages": 1}, "pages is 1: there is no such field"),
        ({}, "memory_size is missing: must be given"),
    ],
)
def test_pool_that_cannot_be_is_param_invalid_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamInvalid) as caught:
        PoolConfig(**fields)
    assert caught.value.args[0].startswith(message)


@pytest.mark.parametrize(
    "text", ["null", "1", '"x"', "", "[" * 10_000, '{"memory_size": ' + "9" * 5000 + "}", "\ud800"]
)
def test_whatever_is_no_pool_is_param_invalid_in_few_words(text: str) -> None:
    with pytest.raises(ParamInvalid, match=r"^the_option: ") as caught:
        PoolConfig.parse(text, "the_option")
    assert len(str(caught.value)) < 300


def classes(*sizes: tuple[int, int, int]) -> str:
    """Return the JSON of ``(total_size, blk_size, max_buf_size)`` of each class."""
    names = ("total_size", "blk_size", "max_buf_size")
    return json.dumps({"buf_cfg": [dict(zip(names, size, strict=True)) for size in sizes]})


@pytest.mark.parametrize(
    "text",
    [
        classes((2 * MIB, 1, 1)),
        classes((2 * MIB, 256, 1000), (4 * MIB, 2 * MIB, 4 * MIB - 1)),
        classes((0xFFFFFFFF // (2 * MIB) * 2 * MIB, 2 * MIB, 2 * MIB)),
        '{"buf_pool_size": 5}',
        '{"buf_pool_size": 5, ' + classes((2 * MIB, 1, 1))[1:],
    ],
)
def test_size_classes_that_keep_the_rules(text: str) -> None:
    assert LLMConfig(buf_pool_cfg=text).buf_pool_cfg == text
    assert BufferPoolConfig.parse(text, "x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (classes((3 * MIB, 1, 1)), "buf_cfg.0.total_size is 3145728: must be a multiple of 2097152"),
        (classes((4096 * MIB, 1, 1)), "total_size is 4294967296: must be less than or equal to 4294967295"),
        (classes((0, 1, 1)), "total_size is 0: must be greater than 0"),
        (classes((2 * MIB, 3, 3)), "blk_size is 3: must be a power of two"),
        (classes((2 * MIB, 0, 3)), "blk_size is 0: must be greater than 0"),
        (classes((8 * MIB, 4 * MIB, 4 * MIB)), "blk_size is 4194304: must be less than or equal to 2097152"),
        (classes((2 * MIB, 4, 3)), "max_buf_size is 3: must be at least blk_size, 4"),
        (classes((2 * MIB, 4, 2 * MIB)), "max_buf_size is 2097152: must be below total_size, 2097152"),
        (
            classes((2 * MIB, 4, 8), (2 * MIB, 4, 8)),
            "buf_cfg.1.max_buf_size is 8: must be above the one before it, 8",
        ),
        ('{"buf_cfg": [{"total_size": 2097152}]}', "buf_cfg.0.blk_size is missing"),
        ('{"buf_pool_size": 1, "size": 2}', "size is 2: there is no such field"),
    ],
)
def test_size_classes_that_break_one(text: str, words: str) -> None:
    with pytest.raises(ParamInvalid) as caught:
        LLMConfig(buf_pool_cfg=text)
    assert str(caught.value).startswith("buf_pool_cfg: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["secret", b"secret", SecretBytes(b"secret")])
def test_key_is_bytes_and_never_shown(key: object) -> None:
    config = LLMConfig(**_any(auth_key=key))
    assert config.auth_key is not None
    assert config.auth_key.get_secret_value() == b"secret"
    assert "secret" not in repr(config) + str(config.generate_options())


def test_key_of_a_wrong_type_is_not_shown_either() -> None:
    with pytest.raises(TypeError) as caught:
        LLMConfig(**_any(auth_key=["secret"]))
    assert "secret" not in str(caught.value)


def test_every_transport_can_be_configured() -> None:
    for name in TRANSPORTS:
        assert LLMConfig(**_any(transport=name)).transport == name


def test_resource_of_the_largest_size_is_accepted() -> None:
    text = json.dumps({"x": ""})
    assert LLMConfig(local_comm_res=text + " " * (MAX_LOCAL_COMM_RES - len(text))).local_comm_res is not None


def _any(**values: Any) -> dict[str, Any]:
    """Return arguments that the type checker would refuse."""
    return values


def test_what_the_constructor_repeats_for_type_checkers_are_the_defaults() -> None:
    parameters = inspect.signature(LLMConfig.__init__).parameters
    repeated = {
        name: parameters[name].default for name in LLMConfig.model_fields if name not in {"device_id", "ge_options"}
    }
    assert repeated == {name: LLMConfig.model_fields[name].default for name in repeated}
