"""Workers of a test run give no port twice."""

from __future__ import annotations

import pytest

from aiodatadist._testing import ports


def range_of(worker: str, count: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
    return set(ports.own_range(20_000, 20_100))


def test_workers_share_all_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [range_of(f"gw{i}", 3, monkeypatch) for i in range(3)]
    assert set().union(*shares) == set(range(20_000, 20_100))
    assert sum(map(len, shares)) == 100


def test_runs_beside_each_other_share_all_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for run in range(2):
        monkeypatch.setenv("AIODATADIST_PORTS", f"{run}/2")
        shares += [range_of(f"gw{i}", 3, monkeypatch) for i in range(3)]
    assert set().union(*shares) == set(range(20_000, 20_100))
    assert sum(map(len, shares)) == 100


def test_without_workers_all_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "AIODATADIST_PORTS"):
        monkeypatch.delenv(name, raising=False)
    assert list(ports.own_range(20_000, 20_003)) == [20_000, 20_001, 20_002]


def test_no_port_is_given_twice() -> None:
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == 50
