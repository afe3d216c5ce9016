"""Options of engines: each has its effect, or is refused by name, or its remark says why it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import FeatureNotEnabled, LLMConfig, ParamInvalid
from aiodatadist._hixl.names import EngineName, parse_name, parse_peer
from aiodatadist._hixl.options import BufferPool, read_options
from aiodatadist._hixl.resources import PROTOCOLS, WITHOUT_EFFECT
from aiodatadist._hixl.staging import pieces_of

TABLE = '{"version": "1.0", "server_list": []}'


def resources(**keys: Any) -> dict[str, str]:
    return {"GlobalResourceConfig": json.dumps({key.replace("__", "."): value for key, value in keys.items()})}


def test_options_have_defaults() -> None:
    found = read_options({})
    assert found.buffers == BufferPool(4, 8 << 20)
    assert not found.auto_connect
    assert not found.lists_requests
    assert found.remarks == []
    assert (found.resources.connect_threads, found.resources.connect_queue) == (2, 128)
    assert found.config.enable_cache_manager
    assert found.config.enable_remote_cache_accessible


@pytest.mark.parametrize("prefix", ["", "adxl."])
def test_options_reach_the_cluster(prefix: str) -> None:
    given = {f"{prefix}RdmaTrafficClass": "36", f"{prefix}RdmaServiceLevel": "3", f"{prefix}LocalCommRes": TABLE}
    config = read_options({**given, "aiodatadist.Transport": "tcp", "ge.exec.deviceId": "3"}).config
    assert (config.rdma_traffic_class, config.rdma_service_level, config.local_comm_res) == (36, 3, TABLE)
    assert (config.transport, config.device_id) == ("tcp", 3)


@pytest.mark.parametrize(("text", "pool"), [("0:0", BufferPool(0, 0)), ("2:16", BufferPool(2, 16 << 20))])
def test_a_buffer_pool_is_a_number_and_a_size(text: str, pool: BufferPool) -> None:
    assert read_options({"BufferPool": text}).buffers == pool
    assert read_options({"adxl.BufferPool": text}).buffers == pool


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"Unknown": "1"}, "option 'Unknown' is unknown"),
        ({"bufferpool": "1:1"}, "option 'bufferpool' is unknown"),
        ({"adxl.AutoConnect": "1"}, "is unknown"),
        ({"BufferPool": "4:8", "adxl.BufferPool": "4:9"}, "is the same option with another value"),
        *(({"BufferPool": bad}, "must be 'COUNT:MIB'") for bad in ("", "4", "0:8", "4:0", "-1:1", "4:8:1", "1025:1")),
        *(({"AutoConnect": bad}, "must be '0' or '1'") for bad in ("", "2", "true")),
        *(({"EnableUseFabricMem": bad}, "must be '0' or '1'") for bad in ("", "on")),
        *(({"RdmaTrafficClass": bad}, "a multiple of 4 in") for bad in ("", "3", "256", "-4", "4.0")),
        *(({"RdmaServiceLevel": bad}, r"in \[0, 7\]") for bad in ("", "8", "-1")),
        *(({"LocalCommRes": bad}, "LocalCommRes") for bad in ("{", "[]", '{"version": "2.0"}', '{"version": 1.3}')),
        ({"LocalCommRes": '{"version": "1.3"}', "BufferPool": "4:8"}, "only '0:0' is allowed"),
        *(({"GlobalResourceConfig": bad}, "GlobalResourceConfig") for bad in ("{", "[]", "5")),
        (resources(connect_pool__thread_num=0), r"must be a whole number in \[1, 64\]"),
        (resources(connect_pool__thread_num="65"), r"must be a whole number in \[1, 64\]"),
        (resources(connect_pool__thread_num=True), "must be a whole number"),
        (resources(connect_pool__task_queue_capacity=65536), "must be a whole number"),
        (resources(comm_resource_config__listen_port=0), "must be a whole number"),
        (resources(comm_resource_config__qos=8), "must be a whole number"),
        (resources(comm_resource_config__max_active_channels=0), "must be a whole number"),
        (resources(comm_resource_config__protocol_desc="ib:device"), "must be one or a list of"),
        (resources(comm_resource_config__protocol_desc=[]), "must be one or a list of"),
        (resources(comm_resource_config__protocol_desc=["hccs:device", 5]), "must be one or a list of"),
        (resources(channel_pool__max_channel=513), "must be a whole number"),
        (resources(channel_pool__high_waterline=0.5), "must be given together"),
        (resources(channel_pool__high_waterline=0.5, channel_pool__low_waterline=0.5), "must be below"),
        (resources(channel_pool__high_waterline=1, channel_pool__low_waterline=0.5), "above 0 and below 1"),
        (resources(channel_pool__high_waterline="x", channel_pool__low_waterline=0.5), "above 0 and below 1"),
        (resources(fabric_memory__max_capacity=0), "must be a whole number"),
        (resources(fabric_memory__start_address=1025), "must be a whole number"),
        (resources(fabric_memory__task_stream_num=9), "must be a whole number"),
        (resources(fabric_memory__enable_aicpu_unfold="maybe"), "must be true or false"),
        (resources(local_comm_res_path=""), "must be the path of a file"),
        (resources(local_comm_res_path="/no/such/file"), "cannot be read"),
        (resources(local_comm_res_path="/dev/null"), "must be a file of 1 to"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_refused_with_the_rule(given: dict[str, str], words: str) -> None:
    with pytest.raises(ParamInvalid, match=words):
        read_options(given)


@pytest.mark.parametrize("bad", [5, [], "AutoConnect", {1: "1"}, {"AutoConnect": 1}])
def test_options_are_a_dictionary_of_texts(bad: Any) -> None:
    with pytest.raises(TypeError):
        read_options(bad)


def test_what_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(FeatureNotEnabled, match="EnableUseFabricMem"):
        read_options({"EnableUseFabricMem": "1"})
    with pytest.raises(FeatureNotEnabled, match="endpoint_list"):
        read_options({"LocalCommRes": '{"version": "1.3", "endpoint_list": [{"protocol": "roce"}]}'})


def test_every_key_without_effect_is_remarked_upon() -> None:
    values = {"protocol_desc": sorted(PROTOCOLS), "enable_aicpu_unfold": "true"}
    given = {key: values.get(key.partition(".")[2], 1) for key in WITHOUT_EFFECT}
    found = read_options({"GlobalResourceConfig": json.dumps({**given, "nonsense": {}})})
    for key in (*WITHOUT_EFFECT, "nonsense"):
        assert len([line for line in found.remarks if key in line and "has no effect" in line]) == 1
    assert found.lists_requests


def test_version_1_3_is_the_newer_engine_without_buffers() -> None:
    found = read_options({"LocalCommRes": '{"version": "1.3"}'})
    assert found.lists_requests
    assert found.buffers.count == 0
    assert found.config.local_comm_res is None
    assert "communicators" in found.remarks[0]
    assert read_options({"LocalCommRes": ""}).comm_version == ""


def test_water_marks_are_shares_of_the_connections() -> None:
    keys = {"channel_pool__high_waterline": 0.5, "channel_pool__low_waterline": "0.1"}
    options = read_options(resources(channel_pool__max_channel=8, **keys))
    assert "channel_pool has no effect" in options.remarks[0]
    assert read_options({**resources(**keys), "AutoConnect": "1"}).remarks == []
    found = options.resources
    assert (found.max_channels, found.high_mark, found.low_mark) == (8, 4, 1)
    found = read_options(resources(channel_pool__max_channel="8")).resources
    assert (found.max_channels, found.high_mark, found.low_mark) == (8, 8, 8)
    assert read_options({}).resources.max_channels == 0


def test_a_file_stands_for_local_comm_res(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(TABLE)
    assert read_options(resources(local_comm_res_path=str(file))).config.local_comm_res == TABLE
    both = read_options({**resources(local_comm_res_path=str(file)), "LocalCommRes": '{"version": "1.3"}'})
    assert both.comm_version == "1.3"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * ((1 << 20) + 1))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff")
    for bad in (link, large, binary, tmp_path):
        with pytest.raises(ParamInvalid, match="local_comm_res_path"):
            read_options(resources(local_comm_res_path=str(bad)))


def test_a_configuration_is_taken_as_it_is() -> None:
    config = LLMConfig(transport="tcp")
    found = read_options(config)
    assert found.config.transport == "tcp"
    assert found.config is not config


# ---- names ----


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("127.0.0.1:26000", EngineName("127.0.0.1", 26000)),
        ("127.0.0.1:0", EngineName("127.0.0.1", 0)),
        ("10.0.0.7", EngineName("10.0.0.7", 0)),
        ("[::1]:5", EngineName("::1", 5)),
        ("[fe80::1]", EngineName("fe80::1", 0)),
        ("[0:0:0:0:0:0:0:1]:5", EngineName("::1", 5)),
        ("[FE80:0::0001%eth0]:5", EngineName("fe80::1%eth0", 5)),
        ("[0::ffff:a00:7]:5", EngineName("::ffff:10.0.0.7", 5)),
    ],
)
def test_names_of_engines(text: str, name: EngineName) -> None:
    assert parse_name(text, "name") == name
    assert parse_name(str(name), "name") == name


@pytest.mark.parametrize(
    "bad",
    ["", ":", "1", "host", "host:1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1:1", "::1", "[::1",
     "[::1]:", "[::1]x", "[127.0.0.1]:1", "[::1]:x", " 127.0.0.1", "127.0.0.1:\u0661"],
)  # fmt: skip
def test_other_texts_are_no_names(bad: str) -> None:
    with pytest.raises(ParamInvalid, match="must be ip:port, ip"):
        parse_name(bad, "name")


def test_an_engine_has_one_id_however_its_address_is_spelled() -> None:
    names = {
        str(parse_peer(f"[{host}]:26000", "name")) for host in ("2001:db8::1", "2001:DB8:0:0::01", "2001:db8::0.0.0.1")
    }
    assert names == {"[2001:db8::1]:26000"}


def test_an_engine_that_listens_is_known_by_its_name_and_another_is_not() -> None:
    name = parse_peer("127.0.0.1:26000", "name")
    assert name.cluster_id() == parse_peer("127.0.0.1:26000", "name").cluster_id()
    assert name.cluster_id() != parse_peer("127.0.0.1:26001", "name").cluster_id()
    client = parse_name("127.0.0.1", "name")
    assert client.cluster_id() != client.cluster_id()
    with pytest.raises(ParamInvalid, match="above 0"):
        parse_peer("127.0.0.1", "name")


# ---- loads of staging buffers ----


@pytest.mark.parametrize("room", [1, 7, 100, 10000])
def test_loads_hold_every_byte_once_and_fit_a_buffer(room: int) -> None:
    ranges = [(1000, 5000, 130), (0, 9000, 1), (2000, 100, 70), (3000, 200, 7)]
    moved = []
    mine, theirs, lengths = ([each[i] for each in ranges] for i in range(3))
    for load in pieces_of(mine, theirs, lengths, room):
        offset = 0
        for piece in load:
            assert piece.offset == offset
            offset += piece.nbytes
            moved += [(piece.mine + i, piece.theirs + i) for i in range(piece.nbytes)]
        assert 0 < offset <= room
    assert moved == [(a + i, b + i) for a, b, n in ranges for i in range(n)]
