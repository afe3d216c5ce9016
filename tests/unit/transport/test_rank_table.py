"""Rank tables: what the vendor's library reads, and what a user may give us."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._transport import Endpoint
from aiodatadist._transport.hccl import rank_table


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


def test_what_else_was_given_of_a_device_is_in_the_table_and_what_was_not_is_left_out() -> None:
    one = Endpoint("hccl", "ascend", "h", "s", "0", "10.0.0.9", 1, device_port="16667", host_ip="10.1.1.1")
    other = Endpoint("hccl", "ascend", "h", "s", "1", "10.0.0.1", 2, backup_device_ip="10.0.1.1")
    (server,) = json.loads(rank_table((one, other)))["server_list"]
    assert server == {
        "server_id": "s",
        "host_ip": "10.1.1.1",
        "device": [
            {"device_id": "0", "device_ip": "10.0.0.9", "device_port": "16667", "rank_id": "0"},
            {"device_id": "1", "device_ip": "10.0.0.1", "backup_device_ip": "10.0.1.1", "rank_id": "1"},
        ],
    }


def test_the_hosts_address_is_left_out_where_the_device_has_none() -> None:
    """Leave out the host's address, which HCCL would take for host network cards, for the whole communicator.

    [src topoinfo_ranktableConcise.cc:89-105].
    """
    one = Endpoint("hccl", "ascend", "h", "s", "0", "", 1, host_ip="10.1.1.1")
    other = Endpoint("hccl", "ascend", "h", "s", "1", "10.0.0.1", 2)
    (server,) = json.loads(rank_table((one, other)))["server_list"]
    assert "host_ip" not in server
