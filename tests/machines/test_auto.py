"""``transport="auto"``: memory that is shared on one machine, TCP between two, and the same at both ends of a link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.machines.ends import QUICK, End, Refused, at, opened, trust_of
from tests.machines.networks import PORT, Machine, address, cable, machines
from tests.profiles import at_night

FOLDER = "SOFTNPU_RENDEZVOUS"
BYTES = 4 * 4096
"""The bytes of a block, over all tensors."""
ONE_SIDED: dict[str, Any] = {"enable_remote_cache_accessible": True}
REQUESTS: dict[str, Any] = {"enable_remote_cache_accessible": False}


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)


@pytest.fixture
def both() -> Iterator[tuple[Machine, Machine]]:
    with machines("a", "b") as (a, b):
        cable(a, b)
        yield a, b


@contextmanager
def ends(
    places: tuple[Machine, Machine], one: dict[str, Any], other: dict[str, Any] | None = None
) -> Iterator[tuple[End, End]]:
    """Open an owner and a puller, not linked yet. They have one key unless the options say otherwise."""
    with (
        opened(places[0], 1, listen=at(address(1, 1)), **one) as owner,
        opened(places[1], 2, **(one if other is None else other)) as puller,
    ):
        for end in (owner, puller):
            end.call("cache")
        yield owner, puller


def linked(owner: End, puller: End) -> str:
    """Link the two, move blocks both ways, and return how they travelled, which both ends know."""
    puller.call("link", peer=1, host=address(1, 1), port=PORT)
    owner.call("wait_linked", peer=2)
    ways = {owner.call("way", peer=2), puller.call("way", peer=1)}
    assert puller.call("pull", peer=1, src=[3, 4], dst=[0, 9]) == 2 * BYTES
    puller.call("verify", moved={"0": [1, 3], "9": [1, 4]})
    (way,) = ways
    return str(way)


AUTO: dict[str, Any] = {"transport": "auto"}


@pytest.mark.parametrize("mode", [ONE_SIDED, REQUESTS], ids=["one_sided", "requests"])
@pytest.mark.parametrize("trust", ["key", "certificates"])
def test_two_machines_take_tcp(trust: str, mode: dict[str, Any], both: tuple[Machine, Machine], tmp_path: Path) -> None:
    one, other = ({**AUTO, **mode, **trust_of(trust, tmp_path, number)} for number in (1, 2))
    with ends(both, one, other) as (owner, puller):
        assert linked(owner, puller) == "tcp"


@pytest.mark.parametrize("trust", ["key", "certificates"])
def test_two_processes_of_one_machine_share_memory(trust: str, both: tuple[Machine, Machine], tmp_path: Path) -> None:
    """At the address of a network, which alone would let TCP be taken."""
    one, other = ({**AUTO, **trust_of(trust, tmp_path, number)} for number in (1, 2))
    with ends((both[0], both[0]), one, {**other, "device_id": 1}) as (owner, puller):
        assert linked(owner, puller) == "hccl"


def test_one_device_of_one_machine_is_enough_for_two_processes(both: tuple[Machine, Machine]) -> None:
    with ends((both[0], both[0]), AUTO) as (owner, puller):
        assert linked(owner, puller) == "hccl"


@pytest.mark.parametrize("which", ["both", "listener", "dialler"])
def test_a_folder_at_both_ends_joins_two_networks_and_one_at_an_end_does_not(
    which: str, both: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TemporaryDirectory(prefix="npu") as folder:
        monkeypatch.setenv(FOLDER, "" if which == "dialler" else folder)
        with opened(both[0], 1, listen=at(address(1, 1)), **AUTO) as owner:
            monkeypatch.setenv(FOLDER, "" if which == "listener" else folder)
            with opened(both[1], 2, **AUTO) as puller:
                for end in (owner, puller):
                    end.call("cache")
                assert linked(owner, puller) == ("hccl" if which == "both" else "tcp")


@pytest.mark.parametrize("auto_is", ["owner", at_night("puller")])
@pytest.mark.parametrize("transport", ["tcp", "hccl"])
def test_auto_follows_the_choice_of_the_other_end(transport: str, auto_is: str, both: tuple[Machine, Machine]) -> None:
    places = both if transport == "tcp" else (both[0], both[0])
    options = [AUTO, {"transport": transport}]
    if auto_is == "puller":
        options.reverse()
    with ends(places, *options) as (owner, puller):
        assert linked(owner, puller) == transport


def test_an_end_that_wants_hccl_alone_is_refused_as_before(both: tuple[Machine, Machine]) -> None:
    with ends(both, AUTO, {"transport": "hccl"}) as (_, puller), pytest.raises(Refused) as refused:
        puller.call("link", peer=1, host=address(1, 1), port=PORT)
    assert "softnpu finds no process in another network namespace" in str(refused.value)


def test_a_link_over_tcp_comes_back_over_tcp(both: tuple[Machine, Machine]) -> None:
    settings = {**AUTO, "relink": QUICK}
    with ends(both, settings) as (owner, puller):
        assert linked(owner, puller) == "tcp"
        puller.call("until", phase="LINKED")
        owner.program.kill()
        with opened(both[0], 1, listen=at(address(1, 1)), **settings) as again:
            again.call("cache")
            puller.call("until", phase="LINKED")
            assert puller.call("way", peer=1) == "tcp"
            puller.call("pull", peer=1, src=[5], dst=[1])


def test_a_cache_that_is_registered_after_the_link_is_reached(both: tuple[Machine, Machine]) -> None:
    """Over HCCL, the channel must be replaced first. Over TCP, it reaches whatever is lent."""
    with (
        opened(both[0], 1, listen=at(address(1, 1)), **AUTO) as owner,
        opened(both[1], 2, **AUTO) as puller,
    ):
        puller.call("link", peer=1, host=address(1, 1), port=PORT)
        owner.call("wait_linked", peer=2)
        for end in (owner, puller):
            end.call("cache")
        assert puller.call("pull", peer=1, src=[3], dst=[0]) == BYTES
        puller.call("verify", moved={"0": [1, 3]})
        assert puller.call("push", peer=1, src=[7], dst=[2]) == BYTES
