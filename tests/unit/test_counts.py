"""Ceilings for what makes tests slow or fragile: it becomes rarer, and never more frequent."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import counts, rooms

TOGETHER = rooms.ONE_WORKER


@pytest.fixture(scope="module")
def found() -> Counter[str]:
    return Counter(place.kind for place in counts.all_places())


@pytest.mark.parametrize("kind", counts.CEILINGS)
def test_no_count_rises(kind: str, found: Counter[str]) -> None:
    assert found[kind] <= counts.CEILINGS[kind], f"python -m tests.counts {kind} lists the places"


PRIVATE = frozenset({"_engine", "_running"})


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("await asyncio.sleep(0.1)", ["guessing sleeps"]),
        ("await anyio.sleep(seconds)", ["guessing sleeps"]),
        ("for _ in range(3):\n    time.sleep(1)", ["guessing sleeps"]),
        ("await asyncio.sleep(0)", []),
        ("while not ready:\n    await asyncio.sleep(0.001)", ["polls"]),
        ("while True:\n    for each in all:\n        time.sleep(each)", ["guessing sleeps"]),
        ("while True:\n    def wait():\n        time.sleep(1)", ["guessing sleeps"]),
        ("while not ready:\n    await asyncio.sleep(0)", []),
        ("soft_fault('HcclBatchGet:delay=3')", ["delays"]),
        ("soft_fault(f'Hccl{call}:delay={ms}@1;HcclBatchPut:delay=3')", ["delays", "delays"]),
        ("soft_fault('HcclBatchGet:hang')", []),
        ("with anyio.fail_after(0.5): ...", ["short limits"]),
        ("event.wait(timeout=0.2)", ["short limits"]),
        ("with anyio.fail_after(1): ...", ["short limits"]),
        ("with anyio.fail_after(10): ...", []),
        ("with anyio.move_on_after(1): ...", []),
        ("assert time.monotonic() - began < 2", ["clock limits"]),
        ("assert 0.1 <= loop.time() - began < 2", ["clock limits"]),
        ("assert loop.time() - began >= 2", []),
        ("assert time.monotonic() < until", []),
        ("with pytest.raises(TimeoutError):\n    with anyio.fail_after(0.5): ...", []),
        ("with pytest.raises(OSError):\n    with anyio.fail_after(0.5): ...", ["short limits"]),
        ("manager._engine", ["private reaches"]),
        ("from aiodatadist._cluster.engine import _running", ["private reaches"]),
        ("monkeypatch.setattr(manager, '_engine', None)", ["private reaches"]),
        ("self._engine", []),
        ("other._of_another_library", []),
        ("class Own:\n    def _engine(self): ...\nOwn()._engine()", []),
        ("subprocess.run(['true'])", ["process starts"]),
        ("children.run([sys.executable, '-c', program])", []),
        ("await anyio.open_process(['true'])", ["process starts"]),
        ("worker.run()", []),
        ("@pytest.mark.measures\ndef test_it(): time.sleep(1)", []),
        ("@pytest.mark.timeout(9)\ndef test_it(): time.sleep(1)", ["guessing sleeps"]),
        ("pytestmark = pytest.mark.alone\ntime.sleep(1)", []),
        ("@pytest.mark.autojump\nasync def test_it(): await anyio.sleep(1)", []),
        (
            "pytestmark = [pytest.mark.autojump]\nasync def test_it():\n    with anyio.fail_after(0.1): it._engine",
            ["private reaches"],
        ),
        ("await let_pass(2)", ["time that passes"]),
        ("cache.load([1], timeout=0.1)", []),
    ],
)
def test_places_are_found(source: str, kinds: list[str]) -> None:
    assert [place.kind for place in counts.places_in(source, private=PRIVATE)] == kinds


def test_lists_and_counts_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    places = [counts.Place("delays", "test_it.py", 3), counts.Place("polls", "test_that.py", 5)]
    monkeypatch.setattr(counts, "all_places", lambda: places)
    monkeypatch.setattr("sys.argv", ["counts", "delays"])
    counts.main()
    assert capsys.readouterr().out == "test_it.py:3\n"
    monkeypatch.setattr("sys.argv", ["counts"])
    counts.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:1] for line in lines] == [kind.split()[:1] for kind in counts.CEILINGS]
    assert "   1 in   1 files" in next(line for line in lines if line.startswith("polls"))
