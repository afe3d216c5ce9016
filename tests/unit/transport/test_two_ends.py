"""Rank tables that HCCL cannot use, or whose two ends differ, are reported before HCCL is asked."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from aiodatadist import IncompatiblePeer
from aiodatadist._transport import Endpoint
from aiodatadist._transport.two_ends import check_ends

MINE = Endpoint("hccl", "ascend", "boot:0", "10.1.0.1", "0", "10.0.0.1", 1)
PEER = replace(MINE, device_id="1", device_ip="10.0.0.2", process=2)
FAR = replace(MINE, host="other:0", server_id="10.1.0.2", device_ip="10.0.0.3")
POD: dict[str, Any] = {"super_pod_id": "3", "super_device_id": "7"}


@pytest.mark.parametrize("roce", [False, True])
@pytest.mark.parametrize("peer", [PEER, FAR, replace(FAR, host="other:1000")])
def test_two_devices_are_linked(peer: Endpoint, roce: bool) -> None:
    check_ends(MINE, peer, needs_address=roce)
    check_ends(peer, MINE, needs_address=roce)


def test_over_hccs_no_device_needs_an_address_and_two_without_one_are_not_alike() -> None:
    check_ends(replace(MINE, device_ip=""), replace(PEER, device_ip=""), needs_address=False)


def test_the_hosts_own_card_does_not_stand_in_for_the_devices() -> None:
    """HCCL would use it for the whole communicator: staging memory and TCP."""
    with pytest.raises(IncompatiblePeer, match="has no device_ip"):
        check_ends(replace(MINE, device_ip="", host_ip="10.1.0.1"), PEER, needs_address=True)


def test_super_pods_are_named_by_both() -> None:
    check_ends(replace(MINE, **POD), replace(FAR, super_pod_id="4", super_device_id="7"), needs_address=True)


ONE_NPU = "both ends are device 0 of server 10.1.0.1: HCCL links different devices only"


@pytest.mark.parametrize(
    ("changes", "roce", "words", "cure"),
    [
        ({"device_id": "0"}, False, ONE_NPU, "ASCEND_RT_VISIBLE_DEVICES"),
        ({"device_id": "0", "host": "boot:1000"}, False, ONE_NPU, "another device"),
        ({"device_id": "0", "server_id": "172.17.0.2"}, True, "both ends are device 0", "another device"),
        ({"device_ip": "10.0.0.1"}, False, "both have device_ip 10.0.0.1", "hccn_tool"),
        ({"device_ip": ""}, True, "device 1 of server 10.1.0.1 has no device_ip", "hccn_tool -i 1 -ip -g"),
        ({"host": "other:0"}, False, "have server_id 10.1.0.1 but run on two machines", "its own server_id"),
        (POD, False, "names its super pod, 3, and", "version 1.2, or none"),
    ],
)  # fmt: skip
def test_what_hccl_cannot_link_has_value_rule_and_cure(
    changes: dict[str, Any], roce: bool, words: str, cure: str
) -> None:
    peer = replace(PEER, **changes)
    for ends in ((MINE, peer), (peer, MINE)):
        with pytest.raises(IncompatiblePeer, match=re.escape(words)) as caught:
            check_ends(*ends, needs_address=roce)
        assert cure in str(caught.value)
