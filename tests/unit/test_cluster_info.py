"""A peer's id and address: checked when they are said, not when they are used."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import LLMClusterInfo, LLMRole, ParamInvalid


def test_text_becomes_the_number_that_upstream_makes_of_it() -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info("1.2.3.4", 26000)
    assert info.remote_ip_info_list == [(0x04030201, 26000)]
    assert info.remote_addresses == [("1.2.3.4", 26000)]


@given(st.ip_addresses(v=4), st.integers(0, 2**16 - 1))
def test_every_address_comes_back_as_it_was_said(ip: ipaddress.IPv4Address, port: int) -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info(str(ip), port)
    ((number, _),) = info.remote_ip_info_list
    info.append_remote_ip_info(number, port)
    assert info.remote_addresses == [(str(ip), port)] * 2


@given(st.ip_addresses(v=6), st.integers(0, 2**16 - 1))
def test_ipv6_is_kept_as_text(ip: ipaddress.IPv6Address, port: int) -> None:
    info = LLMClusterInfo(1)
    info.append_remote_ip_info(ip.exploded, port)
    info.append_local_ip_info(ip.exploded, port)
    assert info.remote_addresses == info.remote_ip_info_list == info.local_ip_info_list == [(str(ip), port)]
    assert repr(info) == f"<LLMClusterInfo 1 at [{ip}]:{port}>"


def test_each_call_appends_to_its_own_list() -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info("10.0.0.1", 1)
    info.append_remote_ip_info("10.0.0.2", 2)
    info.append_local_ip_info("10.0.0.3", 3)
    assert [port for _, port in info.remote_ip_info_list] == [1, 2]
    assert [port for _, port in info.local_ip_info_list] == [3]


def test_names_of_hosts_stay_names() -> None:
    info = LLMClusterInfo(1)
    info.append_remote_ip_info("prefill-0.prefill.default.svc.cluster.local", 26000)
    assert info.remote_ip_info_list == [("prefill-0.prefill.default.svc.cluster.local", 26000)]
    assert repr(info) == "<LLMClusterInfo 1 at prefill-0.prefill.default.svc.cluster.local:26000>"


def test_lists_are_copies() -> None:
    info = LLMClusterInfo()
    info.remote_ip_info_list.append((1, 1))
    assert info.remote_ip_info_list == []


@pytest.mark.parametrize(
    "ip",
    [
        "",
        "1.2.3",
        "1.2.3.4.5",
        "01.2.3.4",
        "256.1.1.1",
        ":::1",
        "[::1]",
        "a b",
        "-a",
        "user@host",
        "0x7f000001",
        "1.0x2",
    ],
)
def test_text_that_is_no_address_is_a_runtime_error(ip: str) -> None:
    with pytest.raises(RuntimeError, match="must be an IPv4 or IPv6 address, or the name of a host"):
        LLMClusterInfo().append_remote_ip_info(ip, 1)


@pytest.mark.parametrize(
    ("ip", "port", "error"),
    [
        (None, 1, TypeError),
        (1.5, 1, TypeError),
        (-1, 1, ValueError),
        (2**32, 1, ValueError),
        ("1.2.3.4", "1", TypeError),
        ("1.2.3.4", None, TypeError),
        ("1.2.3.4", -1, ValueError),
        ("1.2.3.4", 2**16, ValueError),
    ],
)
def test_wrong_addresses_and_ports_are_refused_at_once(ip: Any, port: Any, error: type[Exception]) -> None:
    info = LLMClusterInfo()
    for append in (info.append_remote_ip_info, info.append_local_ip_info):
        with pytest.raises(error):
            append(ip, port)
    assert info.remote_ip_info_list == info.local_ip_info_list == []


def test_cluster_id_is_unset_until_it_is_a_uint64() -> None:
    assert LLMClusterInfo().remote_cluster_id is None
    info = LLMClusterInfo()
    info.remote_cluster_id = 2**64 - 1
    wrong: list[tuple[Any, type[Exception]]] = [
        ("1", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (2**64, ValueError),
    ]
    for value, error in wrong:
        with pytest.raises(error, match="remote_cluster_id"):
            info.remote_cluster_id = value
    assert info.remote_cluster_id == 2**64 - 1


def test_role_is_a_role_or_a_number() -> None:
    info = LLMClusterInfo(3, LLMRole.PROMPT)
    assert info.remote_role_type is LLMRole.PROMPT
    info.remote_role_type = 2
    wrong: Any = "Prompt"
    with pytest.raises(TypeError, match="remote_role_type"):
        info.remote_role_type = wrong


def test_repr_says_who_and_where() -> None:
    info = LLMClusterInfo(7)
    info.append_remote_ip_info("127.0.0.1", 26000)
    assert repr(info) == "<LLMClusterInfo 7 at 127.0.0.1:26000>"


@pytest.mark.parametrize(
    ("address", "kept"),
    [
        (("10.0.0.7", 26001), ("10.0.0.7", 26001)),
        ("10.0.0.7:26001", ("10.0.0.7", 26001)),
        (("::1", 26001), ("::1", 26001)),
        ("[::1]:26001", ("::1", 26001)),
        ("prefill-0.prefill:26001", ("prefill-0.prefill", 26001)),
    ],
)
def test_an_address_fits_into_the_constructor(address: Any, kept: tuple[str, int]) -> None:
    for info in (LLMClusterInfo(7, address), LLMClusterInfo(7, LLMRole.PROMPT, address=address)):
        assert (info.remote_cluster_id, info.remote_addresses) == (7, [kept])


@pytest.mark.parametrize(
    ("address", "error"),
    [("10.0.0.7", ParamInvalid), ("::1:26001", ParamInvalid), (("h", 0), ParamInvalid), (("h",), TypeError),
     (("h", "1"), TypeError), ((1, 1), TypeError), (("h", 2**16), ValueError), (b"h:1", TypeError)],
)  # fmt: skip
def test_a_wrong_address_in_the_constructor_is_refused(address: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        LLMClusterInfo(7, address=address)


def test_an_address_that_is_given_twice_is_refused() -> None:
    twice: Any = LLMClusterInfo
    with pytest.raises(TypeError, match="given twice"):
        twice(7, "h:1", address="h:1")
