"""The address at which a member of a rank table listens."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest

from aiodatadist._cluster import rank_groups
from aiodatadist._cluster.rank_groups import own_address
from aiodatadist.errors import ParamInvalid


def table(*servers: dict[str, Any]) -> str:
    return json.dumps({"server_list": [{**s, "device": [{"rank_id": str(i)}]} for i, s in enumerate(servers)]})


def test_the_address_is_host_ip_and_server_id_a_name() -> None:
    text = table({"server_id": "xxxx", "host_ip": "127.0.0.2"}, {"server_id": "10.9.9.9", "host_ip": "::1"})
    assert [own_address(text, rank) for rank in (0, 1)] == ["127.0.0.2", "::1"]


@pytest.mark.parametrize("name", ["xxxx", "1", "203.0.113.9"])
def test_without_host_ip_it_is_this_machines_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipaddress.ip_address(own_address(table({"server_id": name}), 0)) != ipaddress.ip_address("203.0.113.9")
    monkeypatch.setattr(rank_groups, "server_address", lambda: "198.51.100.7")
    assert own_address(table({"server_id": name}, {"server_id": "other"}), 0) == "198.51.100.7"


def test_without_a_route_only_members_on_the_same_server_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_groups, "server_address", lambda: "")
    assert own_address(table({"server_id": "xxxx"}), 0) == "127.0.0.1"
    with pytest.raises(ParamInvalid, match=r"^the server of rank 1 has no host_ip, and this machine no route"):
        own_address(table({"server_id": "xxxx"}, {"server_id": "1"}), 1)


@pytest.mark.parametrize("host", ["xxxx", "", 7, "127.0.0.1:80"])
def test_a_host_ip_that_is_no_address_is_refused(host: object) -> None:
    with pytest.raises(ParamInvalid, match=r"^host_ip of the server of rank 0 is .*: must be an IP address"):
        own_address(table({"server_id": "xxxx", "host_ip": host}), 0)
