"""The local device in a rank table: values that a user may give, and values found without them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import LLMStatusCode, ParamInvalid
from aiodatadist._device import Device
from aiodatadist._native.runtime import open_runtime
from aiodatadist._transport import Endpoint
from aiodatadist._transport.local_device import check_device, describe, device_address, parse_resource, resource_of

DEVICE: dict[str, Any] = {"device_id": "3", "device_ip": "10.0.0.3"}
PODS = [{"super_pod_id": "p", "server_list": [{"server_id": "s"}]}]


def table(device: dict[str, Any] | None = None, server: dict[str, Any] | None = None, **others: Any) -> str:
    device = DEVICE if device is None else {**DEVICE, **device}
    return json.dumps(
        {"version": "1.0", "server_list": [{"server_id": "s", "device": [device], **(server or {})}], **others}
    )


def without(name: str, text: str) -> str:
    return re.sub(rf'"{name}": "[^"]*"(, )?', "", text).replace(", }", "}")


def test_one_device_is_an_endpoint() -> None:
    text = table(
        {"super_device_id": "9", "device_port": 16667, "backup_device_ip": "10.0.1.3"},
        {"host_ip": "10.1.1.1"},
        version="1.2",
        super_pod_list=PODS,
    )
    assert parse_resource(text) == {
        "server_id": "s",
        "host_ip": "10.1.1.1",
        "device_id": "3",
        "device_ip": "10.0.0.3",
        "backup_device_ip": "10.0.1.3",
        "device_port": "16667",
        "super_device_id": "9",
        "super_pod_id": "p",
    }


def test_numbers_are_numbers_or_text_and_what_may_be_left_out_is_empty() -> None:
    found = parse_resource('{"server_list": [{"server_id": 7, "device": [{"device_id": 3}]}]}')
    assert found.pop("server_id") == "7"
    assert found.pop("device_id") == "3"
    assert set(found.values()) == {""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "local_comm_res is not JSON"),
        ("[" * 10_000, "local_comm_res is not JSON"),
        ("[]", "local_comm_res is []: must be an object"),
        ("{}", "local_comm_res.server_list is None: must be a list of one"),
        (table(server_list=[]), "local_comm_res.server_list has 0 elements: must be a list of one"),
        (table(server={"device": [DEVICE, DEVICE]}), "local_comm_res.server_list[0].device has 2 elements"),
        (without("device_id", table()), "local_comm_res.server_list[0].device[0] has no device_id"),
        (without("server_id", table()), "local_comm_res.server_list[0] has no server_id"),
        (table({"device_id": "x"}), "device[0].device_id is 'x': must be a number from 0 to 2147483647"),
        (table({"device_id": ["3"]}), "device[0].device_id is ['3']: must be text of at most 127 characters"),
        (table({"device_ip": "x"}), "device[0].device_ip is 'x': must be an IP address"),
        (table({"device_port": 0}), "device[0].device_port is '0': must be a number from 1 to 65535"),
        (table(server={"server_id": None}), "server_list[0].server_id is None: must be text"),
        (table(server={"server_id": "s" * 128}), "must be text of at most 127 characters"),
        (table(version="1.1"), "local_comm_res.version is '1.1': must be 1.0 (A2) or 1.2 (A3)"),
        (table(status="initializing"), "local_comm_res.status is 'initializing': must be completed"),
        (table(version="1.2"), "local_comm_res has no super_pod_id: version 1.2 requires it"),
        (table(version="1.2", super_pod_list=PODS), "local_comm_res has no super_device_id: version 1.2 requires it"),
        (table(super_pod_list=5), "local_comm_res.super_pod_list is 5: must be a list of one"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_rule(text: str, words: str) -> None:
    with pytest.raises(ParamInvalid, match=re.escape(words)) as caught:
        parse_resource(text)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


words = st.sampled_from(["version", "server_list", "server_id", "device", "device_id", "device_ip", "super_pod_list"])
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=7),
)


@given(documents.map(json.dumps) | st.text(max_size=20))
def test_any_text_is_one_device_or_param_invalid(text: str) -> None:
    try:
        found = parse_resource(text)
    except ParamInvalid:
        return
    Endpoint("hccl", "soft", "host", process=1, streams=0, **found)


def test_another_devices_description_and_one_without_its_super_pod_are_refused() -> None:
    found = parse_resource(table())
    check_device(found, device=0, physical=3, has_pods=False)
    check_device(found, device=0, physical=None, has_pods=False)
    with pytest.raises(ParamInvalid, match="describes device 3, but device_id 0 is the physical device 5"):
        check_device(found, device=0, physical=5, has_pods=False)
    with pytest.raises(ParamInvalid, match="no super_pod_list"):
        check_device(found, device=0, physical=3, has_pods=True)


# ---- found ----


def test_the_address_of_a_network_card_stands_in_the_configuration(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_1=10.20.0.1\nnetmask_1=255.255.255.0\naddress_10=10.20.0.10\n", encoding="utf-8")
    assert [device_address(number, conf) for number in (1, 10)] == ["10.20.0.1", "10.20.0.10"]


@pytest.fixture
def hccn_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(script: str) -> None:
        tool = tmp_path / "hccn_tool"
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_else_the_tool_is_asked(tmp_path: Path, hccn_tool: Callable[[str], None]) -> None:
    hccn_tool('echo "ipaddr:10.30.0.$2"; echo "netmask:255.255.255.0"')
    assert device_address(4, tmp_path / "none") == "10.30.0.4"


@pytest.mark.parametrize("script", ["exit 1", "echo nothing"])
def test_a_card_without_an_address_has_none(tmp_path: Path, hccn_tool: Callable[[str], None], script: str) -> None:
    hccn_tool(script)
    assert device_address(4, tmp_path / "none") == ""


async def test_a_device_is_found_without_being_described() -> None:
    async with await Device.open(5) as device:
        found = describe(device.runtime, device.index)
        assert found["device_id"] == "5"
        assert found["server_id"]
        Endpoint("hccl", "ascend", "host", process=1, streams=0, **found)


@pytest.mark.parametrize(
    "given",
    [
        {"server_id": "s", "device_id": "3"},
        {"server_id": "s", "device_id": "3", "device_ip": "10.0.0.3", "host_ip": "10.1.1.1", "device_port": "16667"},
        {
            "server_id": "s",
            "device_id": "3",
            "super_pod_id": "p",
            "super_device_id": "9",
            "backup_device_ip": "10.0.1.3",
        },
    ],
)
def test_fields_are_found_again_in_what_is_made_of_them(given: dict[str, str]) -> None:
    assert {name: value for name, value in parse_resource(resource_of(given)).items() if value} == given


@pytest.mark.parametrize(
    "text", ['{"version": "1.3"}', '{"version": "1.3", "net_instance_id": "s", "endpoint_list": []}']
)
def test_version_1_3_asks_for_the_description_to_be_generated(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The manual recommends it for every chip, and upstream's own connector sends it by default."""
    runtime = open_runtime()
    assert describe(runtime, 1, text) == describe(runtime, 1)
    (said,) = caplog.messages
    assert "this device's description is generated, and endpoints in local_comm_res have no effect" in said
