"""softnpu between two network namespaces: a folder joins the two ends, and without it the error says why they are apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.machines.ends import End, Refused, at, opened
from tests.machines.networks import PORT, Machine, address, cable, machines

FOLDER = "SOFTNPU_RENDEZVOUS"


@pytest.fixture
def both() -> Iterator[tuple[Machine, Machine]]:
    with machines("a", "b") as (a, b):
        cable(a, b)
        yield a, b


@contextmanager
def ends(
    both: tuple[Machine, Machine], folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[End, End]]:
    """Open two ends, each with its folder if that has a name."""
    monkeypatch.setenv(FOLDER, folders[0])
    with opened(both[0], 1, listen=at(address(1, 1)), transport="hccl") as one:
        monkeypatch.setenv(FOLDER, folders[1])
        with opened(both[1], 2, transport="hccl") as other:
            yield one, other


def namespace_of(machine: Machine) -> str:
    return machine.inside(lambda: str(Path("/proc/thread-self/ns/net").readlink()))


@pytest.mark.parametrize("which", ["neither", "listener", "dialler"])
def test_a_link_without_a_folder_at_both_ends_is_refused_at_once(
    which: str, both: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (str(tmp_path) if which == "listener" else "", str(tmp_path) if which == "dialler" else "")
    with ends(both, folders, monkeypatch) as (_, other):
        with pytest.raises(Refused) as refused:
            other.call("link", peer=1, host=address(1, 1), port=PORT)
        words = str(refused.value)
        assert refused.value.kind in {"IncompatiblePeer", "LinkError"}, "the peer may refuse first, with the same words"
        assert all(f"in {namespace_of(each)}" in words for each in both)
        assert "softnpu finds no process in another network namespace" in words
        assert f"{FOLDER} must name one folder at both ends" in words


def test_two_folders_are_doubted_when_the_time_is_over(
    both: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        TemporaryDirectory(prefix="npu") as first,
        TemporaryDirectory(prefix="npu") as second,
        ends(both, (first, second), monkeypatch) as (_, other),
    ):
        with pytest.raises(Refused) as refused:
            other.call("link", peer=1, host=address(1, 1), port=PORT, timeout=2)
        words = str(refused.value)
        assert refused.value.kind == "LinkTimeout"
        assert f"{address(1, 1)}:{PORT} is cluster 1, but the two did not open a channel" in words
        assert all(f"in {namespace_of(each)}" in words for each in both)
        assert f"is {FOLDER} one folder at both ends?" in words


def test_one_folder_joins_the_two(both: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="npu") as folder, ends(both, (folder, folder), monkeypatch) as (one, other):
        one.call("cache")
        other.call("cache")
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        assert other.call("pull", peer=1, src=[3, 4], dst=[0, 9]) == 2 * 4 * 4096
        other.call("verify", moved={"0": [1, 3], "9": [1, 4]})
