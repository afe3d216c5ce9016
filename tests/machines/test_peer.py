"""``aiodatadist doctor --peer``: what is between two machines, and what is in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.machines.commands import KEYS, running, trusting
from tests.machines.networks import Machine, address, cable, machines
from tests.machines.programs import weather

PLACE = f"{address(1, 1)}:26001"
DROP = """
table ip wall {{
  chain in {{ type filter hook input priority 0; tcp dport 26001 {what}; }}
}}
"""


pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def both() -> Iterator[tuple[Machine, Machine]]:
    with machines("a", "b") as (a, b):
        cable(a, b)
        yield a, b


@contextmanager
def serving(machine: Machine, folder: Path, place: str = PLACE) -> Iterator[None]:
    with running(machine, ["aiodatadist", "doctor", "--serve", place], trusting(folder / "one")) as server:
        assert server.line().endswith(f"on the other machine: aiodatadist doctor --peer {place}")
        yield


def found(machine: Machine, folder: Path, place: str = PLACE, keys: str = KEYS) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a look at the peer, and its findings by name."""
    command = ["aiodatadist", "doctor", "--peer", place, "--json", "-"]
    with running(machine, command, trusting(folder / "other", keys)) as looking:
        code, out, errors = looking.rest()
    assert out, errors
    return code, {each["name"]: each for each in json.loads(out)["findings"]}


@pytest.mark.parametrize("family", [4, 6])
def test_all_is_well_between_two_machines(family: int, both: tuple[Machine, Machine], tmp_path: Path) -> None:
    host = address(1, 1, family)
    place = f"[{host}]:26001" if family == 6 else f"{host}:26001"
    with serving(both[0], tmp_path, place):
        code, findings = found(both[1], tmp_path, place)
    assert code == 0
    assert "in packets of at most 1500 bytes" in findings["peer"]["meaning"]
    assert findings["peer's key"]["value"] == "first"
    assert findings["full packets"]["value"] == "pass"
    for name in ("round trip", "from the peer", "to the peer", "all streams"):
        assert findings[name]["mark"] == "ok"
        assert float(findings[name]["value"].split()[0]) > 0


def test_nothing_that_listens_is_told_from_a_firewall(both: tuple[Machine, Machine], nft: None, tmp_path: Path) -> None:
    code, findings = found(both[1], tmp_path)
    assert code == 1
    assert "nothing listens on this port: run aiodatadist doctor --serve there" in findings["peer"]["meaning"]
    both[0].rules(DROP.format(what="drop"))
    with running(both[1], ["aiodatadist", "doctor", "--peer", PLACE], tmp_path / "other") as looking:
        code, out, _ = looking.rest()
    assert code == 1
    told = " ".join(out.split())
    assert "a firewall drops what goes to this port" in told
    assert told.endswith(f"1 fatal: aiodatadist does not work with {PLACE} until that is fixed")


def test_a_machine_without_a_route_is_named(tmp_path: Path) -> None:
    with machines("alone") as (alone,):
        code, findings = found(alone, tmp_path)
    assert code == 1
    assert "there is no way to it: Network is unreachable" in findings["peer"]["meaning"]


def test_another_key_is_told_from_a_closed_port(both: tuple[Machine, Machine], tmp_path: Path) -> None:
    with serving(both[0], tmp_path):
        code, findings = found(both[1], tmp_path, keys=f"first {'a5' * 32}\n")
    assert code == 1
    assert findings["peer"]["mark"] == "ok"
    assert findings["peer's key"]["value"] == "differs"
    assert "both machines need the same keys" in findings["peer's key"]["meaning"]
    assert "round trip" not in findings


@pytest.mark.nightly
def test_full_packets_that_are_lost_in_silence_are_found(tmp_path: Path) -> None:
    with machines("a", "b") as (a, b), weather(a, b) as net, serving(a, tmp_path):
        net.change(largest=1000)
        code, findings = found(b, tmp_path)
    assert code == 1
    assert findings["peer"]["mark"] == "ok"
    (told,) = [each["meaning"] for each in findings.values() if each["mark"] == "fail"]
    assert "mtu 1280" in told
