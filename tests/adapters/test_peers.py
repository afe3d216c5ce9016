"""Rules that say whom an engine dials: what each matches, what is no rule, and which there are without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.peers import NotAPeer, PeerRule, Peers, is_loopback, is_same_host
from aiodatadist._adapters.settings import Settings
from aiodatadist._values.foreign import printable


def peers(*rules: Any) -> Peers:
    return Peers([PeerRule.model_validate(rule) for rule in rules])


@pytest.mark.parametrize(
    ("rule", "matches", "others"),
    [
        (
            "10.0.0.0/24",
            ["10.0.0.1", "10.0.0.255", "::ffff:10.0.0.7"],
            ["10.0.1.0", "h10.0.0.1", "10.0.0.1.example.com"],
        ),
        ("10.0.0.7", ["10.0.0.7"], ["10.0.0.8", "10.0.0.70"]),
        ("2001:db8::/32", ["2001:db8::1", "2001:DB8:0::1"], ["2001:db9::1", "10.0.0.1"]),
        ("::1", ["::1", "0:0:0:0:0:0:0:1"], ["127.0.0.1", "localhost", "::2"]),
        ("prefill.svc", ["prefill.svc", "PREFILL.svc", "prefill.svc."], ["a.prefill.svc", "prefill.svc.evil.com"]),
        (
            "prefill-*.ns.svc",
            ["prefill-1.ns.svc", "prefill-1-a.ns.svc"],
            ["prefill-1.evil.ns.svc", "xprefill-1.ns.svc", "prefill-.ns.svc"],
        ),
        ("*", ["host"], ["host.name", "10.0.0.1", "2130706433", "0x7f000001", "127.1"]),
        ("*.*.*.*", ["a.b.c.d"], ["0x7f.0.0.1", "10.0.0.1"]),
        ("a*b*c.d*e", ["abbxc.de", "abc.d1e", "abcbc.dee"], ["acb.de", "abc.d.e", "ab.c.de"]),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_what_a_rule_matches(rule: str, matches: list[str], others: list[str]) -> None:
    allowed = peers(rule)
    assert [allowed.why_not(host, 1) for host in matches] == [""] * len(matches)
    assert [allowed.why_not(host, 1) for host in others] == [f"{host} is not in peers" for host in others]


@pytest.mark.parametrize("card", ["", "lo", "eth0.100"])
def test_the_name_of_a_network_card_may_stand_behind_an_address(card: str) -> None:
    host = f"fe80::1%{card}" if card else "fe80::1"
    assert peers("fe80::/10").why_not(host, 1) == ""
    assert is_same_host(host, host)


@pytest.mark.parametrize("card", ["\r\nWARNING: all is well", "a b", "\u2028", "\ud800", "x" * 16, "lo\x00"])
def test_an_address_with_anything_else_behind_it_matches_no_rule(card: str) -> None:
    """``ipaddress`` accepts any text there, and a look-up of it raises what no caller expects."""
    host = f"::1%{card}"
    assert peers("::1", "::/0", "*").why_not(host, 1) == f"{printable(host)} is not in peers"
    assert not is_loopback(host)


def test_a_rule_of_many_stars_is_compared_without_backtracking() -> None:
    """Hang, if the comparison tries every way to share a name among the stars."""
    allowed = peers("*-*-*-*-*-*-*-*-*-*-*-*-*-*b")
    assert allowed.why_not("a-" * 31 + "a", 1)
    assert allowed.why_not("a-" * 31 + "b", 1) == ""


def test_ports_and_cluster_ids_narrow_a_rule() -> None:
    allowed = peers(
        {"host": "10.0.0.0/8", "ports": "26000-26007", "cluster_ids": 7}, {"host": "10.0.0.9", "ports": 8998}
    )
    assert allowed.why_not("10.0.0.9", 26000, 7) == ""
    assert allowed.why_not("10.0.0.9", 26007) == "", "a bootstrap server has no cluster id"
    assert allowed.why_not("10.0.0.9", 8998, 1) == ""
    assert allowed.why_not("10.0.0.9", 26008, 7) == "port 26008 of 10.0.0.9, cluster 7 is not in peers"
    assert allowed.why_not("10.0.0.8", 26000, 8) == "port 26000 of 10.0.0.8, cluster 8 is not in peers"
    with pytest.raises(NotAPeer, match=r"^offer refused: 11\.0\.0\.9 is not in peers.*Settings\.peers"):
        allowed.check("11.0.0.9", 26000, 7)


def test_without_a_rule_nothing_matches() -> None:
    assert peers().why_not("127.0.0.1", 1) == "127.0.0.1 is not in peers"


@pytest.mark.parametrize(
    "rule",
    [
        "", "10.0.0.1/24", "10.0.0.256", "1.2.3", "a b", "a..b", "-a", "x" * 254, "a/b", 7, None, ["a"],
        {"ports": 1}, {"host": "a", "port": 1}, {"host": "a", "ports": 0}, {"host": "a", "ports": 65536},
        {"host": "a", "ports": "7-5"}, {"host": "a", "ports": "x"}, {"host": "a", "ports": True},
        {"host": "a", "cluster_ids": -1}, {"host": "a", "cluster_ids": 2**64},
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ValidationError):
        PeerRule.model_validate(rule)


def test_settings_take_rules_as_json() -> None:
    text = json.dumps({"peers": ["10.0.0.0/24", {"host": "p-*.svc", "ports": "1-5", "cluster_ids": "7"}]})
    settings = Settings.model_validate_json(text)
    assert settings.peers == (PeerRule(host="10.0.0.0/24"), PeerRule(host="p-*.svc", ports=(1, 5), cluster_ids=(7, 7)))
    assert Settings.model_validate(json.loads(text)) == settings


def test_on_loopback_loopback_is_dialled_and_elsewhere_nothing() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert is_loopback(host)
        allowed = Settings(host=host).allowed_peers()
        assert [allowed.why_not(peer, 1) for peer in ("127.0.0.5", "::1", "localhost")] == ["", "", ""]
        assert allowed.why_not("10.0.0.1", 1) == "10.0.0.1 is not in peers"
    for host in ("10.0.0.7", "0.0.0.0", "::", "a.name"):
        assert not is_loopback(host)
        settings = Settings(host=host, advertise_host="10.0.0.7")
        assert settings.allowed_peers().why_not("127.0.0.1", 1) == "127.0.0.1 is not in peers"


@pytest.mark.parametrize("peers", [None, [], ["10.0.0.0/24"]], ids=["unset", "none", "some"])
def test_an_engine_that_dials_none_says_so_unless_it_was_told_to(
    peers: list[str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._adapters.settings.is_loopback", lambda _: False)
    service = BlockService(Settings.model_validate({"peers": peers}))
    try:
        service.open_groups([], [], {})
    finally:
        service.close()
    assert ("peers is not set: this engine dials no other" in caplog.text) == (peers is None)


def test_hosts_are_the_same_however_they_are_written() -> None:
    for one, other in (
        ("10.0.0.1", "::ffff:10.0.0.1"),
        ("::1", "0::1"),
        ("Host.", "host"),
        ("fe80::1%lo", "fe80::1%lo"),
    ):
        assert is_same_host(one, other)
    for one, other in (("10.0.0.1", "10.0.0.2"), ("a", "b"), ("a", "10.0.0.1"), ("fe80::1%lo", "fe80::1%eth0")):
        assert not is_same_host(one, other)


def test_look_ups_of_a_name_count_among_those_of_the_entry_that_allowed_it() -> None:
    allowed = peers("10.0.0.0/24", "*.ns.svc", "a.ns.svc", "a*.ns.svc")
    assert [allowed.share_of(host) for host in ("A.ns.svc.", "10.0.0.7")] == [None, None], "as listed"
    of_entry = allowed.share_of("b.ns.svc")
    assert of_entry is not None
    assert of_entry.host == "*.ns.svc"
    assert allowed.share_of("ab.ns.svc") == of_entry == allowed.share_of("c.ns.svc")
