"""Networks on which bytes travel without seals."""

from __future__ import annotations

import pytest

from aiodatadist import LLMConfig
from aiodatadist._config.plain_networks import PlainNetworks
from aiodatadist._config.remarks import remarks


@pytest.mark.parametrize(
    ("host", "is_in"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("10.2.0.1", False),
        ("fd00::7", True),
        ("fd00::7%eth0", True),
        ("fe80::1", False),
        ("", False),
        ("a.example", False),
    ],
)
def test_an_address_is_in_one_of_them_or_not(host: str, is_in: bool) -> None:
    networks = LLMConfig(tcp_plain_networks="10.1.0.0/16, fd00::/8").plain_networks
    assert (host in networks) is is_in
    assert host not in PlainNetworks()


def test_a_cluster_of_another_transport_says_that_the_options_of_tcp_have_no_effect() -> None:
    config = LLMConfig(transport="hccl", tcp_streams=2, tcp_plain_networks="10.0.0.0/8")
    assert remarks(config) == [
        "tcp_streams has no effect: transport is 'hccl', not 'tcp' or 'auto'",
        "tcp_plain_networks has no effect: transport is 'hccl', not 'tcp' or 'auto'",
    ]
