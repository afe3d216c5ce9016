"""Rank tables: what the vendor's library reads, and what a user may give us."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import LLMStatusCode, ParamInvalid
from aiodatadist.transport import Endpoint
from aiodatadist.transport.hccl import parse_resource, rank_table

FIELDS = {"server_id", "device_id", "device_ip", "super_device_id", "super_pod_id"}


def end(server: str, device: str, pod: str = "") -> Endpoint:
    return Endpoint("hccl", "soft", "host", server, device, f"10.0.0.{device}", 1, f"sd{device}" if pod else "", pod)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_two_devices_of_one_server_are_one_server_with_rank_zero_first() -> None:
    assert json.loads(rank_table((end("s", "3"), end("s", "1")))) == {
        "version": "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "s",
                "device": [
                    {"device_id": "3", "device_ip": "10.0.0.3", "rank_id": "0"},
                    {"device_id": "1", "device_ip": "10.0.0.1", "rank_id": "1"},
                ],
            }
        ],
    }


def test_two_servers_are_in_the_order_of_the_ranks() -> None:
    table = json.loads(rank_table((end("b", "0"), end("a", "0"))))
    assert table["server_count"] == "2"
    assert [(server["server_id"], server["device"][0]["rank_id"]) for server in table["server_list"]] == [
        ("b", "0"),
        ("a", "1"),
    ]


def test_one_super_pod_lists_each_of_its_servers_once() -> None:
    table = json.loads(rank_table((end("b", "0", "pod"), end("a", "1", "pod"))))
    assert table["version"] == "1.2"
    assert table["super_pod_list"] == [{"super_pod_id": "pod", "server_list": [{"server_id": "a"}, {"server_id": "b"}]}]
    assert table["server_list"][0]["device"][0]["super_device_id"] == "sd0"


def test_two_super_pods_list_their_own_servers() -> None:
    pods = json.loads(rank_table((end("b", "0", "p0"), end("a", "1", "p1"))))["super_pod_list"]
    assert [(pod["super_pod_id"], pod["server_list"][0]["server_id"]) for pod in pods] == [("p0", "b"), ("p1", "a")]


ends = st.builds(
    Endpoint,
    *[st.text(max_size=8)] * 3,
    server_id=st.sampled_from(["a", "b"]),
    device_id=st.text(max_size=4),
    device_ip=st.text(max_size=8),
    process=st.just(1),
    super_device_id=st.text(max_size=3),
    super_pod_id=st.sampled_from(["", "p", "q"]),
)


@given(st.tuples(ends, ends))
def test_all_values_are_strings_and_every_rank_is_there(pair: tuple[Endpoint, Endpoint]) -> None:
    table = json.loads(rank_table(pair))
    assert all(isinstance(leaf, str) for leaf in leaves(table))
    ranks = {d["rank_id"]: (s["server_id"], d["device_id"]) for s in table["server_list"] for d in s["device"]}
    assert ranks == {str(rank): (end.server_id, end.device_id) for rank, end in enumerate(pair)}


# ---- local_comm_res ----

RESOURCE: dict[str, Any] = {
    "version": "1.2",
    "server_list": [
        {"server_id": "s", "device": [{"device_id": "3", "device_ip": "10.0.0.3", "super_device_id": "9"}]}
    ],
    "super_pod_list": [{"super_pod_id": "p", "server_list": [{"server_id": "s"}]}],
}


def test_resource_of_one_device_is_an_endpoint() -> None:
    assert parse_resource(json.dumps(RESOURCE)) == {
        "server_id": "s",
        "device_id": "3",
        "device_ip": "10.0.0.3",
        "super_device_id": "9",
        "super_pod_id": "p",
    }


def test_resource_without_super_pod_leaves_it_empty() -> None:
    text = '{"version": "1.0", "server_list": [{"server_id": "s", "device": [{"device_id": 3, "device_ip": "x"}]}]}'
    found = parse_resource(text)
    assert (found["device_id"], found["super_device_id"], found["super_pod_id"]) == ("3", "", "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "[" * 10_000,
        '{"server_list": []}',
        '{"server_list": "x"}',
        '{"server_list": [{"server_id": "s", "device": []}]}',
        '{"server_list": [{"server_id": "s", "device": [{"device_id": "3"}]}]}',
        '{"server_list": [{"device": [{"device_id": "3", "device_ip": "x"}]}]}',
        '{"server_list": [{"server_id": null, "device": [{"device_id": "3", "device_ip": "x"}]}]}',
        '{"server_list": [{"server_id": "s", "device": [{"device_id": ["3"], "device_ip": "x"}]}]}',
        json.dumps(RESOURCE | {"server_list": RESOURCE["server_list"] * 2}),
        json.dumps(RESOURCE | {"super_pod_list": [{}]}),
        json.dumps(RESOURCE | {"super_pod_list": 5}),
        json.dumps({"server_list": [{"server_id": "s" * 128, "device": [{"device_id": "3", "device_ip": "x"}]}]}),
    ],
)
def test_anything_but_one_device_is_param_invalid(text: str) -> None:
    with pytest.raises(ParamInvalid, match="local_comm_res does not describe exactly one local device") as caught:
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
    assert set(found) == FIELDS
    Endpoint("hccl", "soft", "host", process=1, **found)
