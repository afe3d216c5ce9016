"""The findings of doctor about networks, on machines that differ."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._cli.doctor.networks import network_findings
from tests.machines.networks import Machine, address, cable, machines, switch

FOLDER = "SOFTNPU_RENDEZVOUS"


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)


def found(machine: Machine) -> dict[str, Finding]:
    return {each.name: each for each in machine.inside(lambda: list(network_findings()))}


def test_loopback_that_is_down_is_fatal() -> None:
    with machines("a") as (a,):
        assert found(a)["loopback"].mark == "ok"
        a.ip("link set lo down")
        loopback = found(a)["loopback"]
        assert (loopback.mark, loopback.value) == ("fail", "no")
        assert "is the interface lo up?" in loopback.meaning


def test_addresses_that_others_reach_are_shown_with_their_mtu() -> None:
    with machines("hub", "a", "b") as (hub, a, b):
        assert found(a)["network"].value == "none"
        switch(hub, a, b, mtu=9000)
        assert found(b)["network"].value == f"net1 {address(1, 2)}, {address(1, 2, 6)} (MTU 9000)"
        cable(b, hub, net=2)
        assert found(b)["network"].value.endswith(f"; net2 {address(2, 1)}, {address(2, 1, 6)} (MTU 1500)")


def test_two_machines_are_two_namespaces_for_softnpu_unless_a_folder_joins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machines("a", "b") as both, TemporaryDirectory(prefix="npu") as folder:
        apart = [found(each)["softnpu's peers"] for each in both]
        assert apart[0].value != apart[1].value
        assert all(each.value.startswith("in net:[") and FOLDER in each.meaning for each in apart)
        monkeypatch.setenv(FOLDER, folder)
        joined = [found(each)["softnpu's peers"] for each in both]
        assert [each.value for each in joined] == [f"in {folder}"] * 2
        assert [each.mark for each in joined] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 60, "must have at most 50"), ("none", "no folder"), ("file", "no folder")]
)
def test_a_folder_that_cannot_be_used_is_fatal(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="npu") as folder, machines("a") as (a,):
        (Path(folder) / "file").touch()
        monkeypatch.setenv(FOLDER, f"{folder}/{name}")
        finding = found(a)["softnpu's peers"]
        assert finding.mark == "fail"
        assert why in finding.meaning
