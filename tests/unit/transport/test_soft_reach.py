"""Two ends that softnpu cannot join are refused, with the places of both and the cure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aiodatadist import IncompatiblePeer
from aiodatadist._transport import Endpoint, soft_reach
from aiodatadist._transport.soft_reach import check_reach, doubts, networks_of

MINE = Endpoint("hccl", "soft", "boot:0", "10.1.0.1", "0", "", 1)
PEER = replace(MINE, device_id="1", process=2)


@pytest.fixture(autouse=True)
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that stands for ``/proc``: processes 1 and 3 are in one network, 2 is in another, 4 has none to show.

    Process 5 is in the other network, and in a container whose processes have numbers of their own.
    """
    for process, network in (("self", ""), (1, "net:[10]"), (2, "net:[20]"), (3, "net:[10]"), (4, ""), (5, "net:[20]")):
        folder = tmp_path / str(process) / "ns"
        folder.mkdir(parents=True)
        (folder / "pid").symlink_to("pid:[2]" if process == 5 else "pid:[1]")
        if network:
            (folder / "net").symlink_to(network)
    monkeypatch.setattr(soft_reach, "PROC", tmp_path)
    monkeypatch.delenv("SOFTNPU_RENDEZVOUS", raising=False)
    return tmp_path


@pytest.mark.parametrize(("mine", "peer"), [(MINE, PEER), (PEER, MINE)])
def test_two_networks_need_a_folder(mine: Endpoint, peer: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatiblePeer) as refused:
        check_reach(mine, peer)
    words = str(refused.value)
    places = ["process 1 is in net:[10], process 2 in net:[20]", "process 2 is in net:[20], process 1 in net:[10]"]
    assert places[mine is PEER] in words
    assert "SOFTNPU_RENDEZVOUS must name one folder at both ends" in words
    monkeypatch.setenv("SOFTNPU_RENDEZVOUS", "/tmp")
    check_reach(mine, peer)
    assert doubts(mine, peer) == f" ({places[mine is PEER]}: is SOFTNPU_RENDEZVOUS one folder at both ends?)"
    assert doubts(replace(mine, transport="tcp"), replace(peer, transport="tcp")) == ""
    assert doubts(replace(mine, runtime="ascend"), replace(peer, runtime="ascend")) == ""


@pytest.mark.parametrize("process", [1, 3, 4, 5, 6])
def test_one_network_and_one_that_cannot_be_known_are_not_refused(process: int) -> None:
    """Process 4 is another user's, 5 is not the peer but has its number here, and 6 has ended."""
    peer = replace(PEER, process=process)
    assert networks_of(MINE, peer) == networks_of(peer, MINE) == ""
    check_reach(MINE, peer)
    check_reach(peer, MINE)


@pytest.mark.parametrize(("host", "who"), [("other:0", "of user 0 on"), ("boot:1000", "of user 1000 on")])
def test_another_machine_or_user_is_refused(host: str, who: str) -> None:
    peer = replace(PEER, host=host)
    for mine, other in ((MINE, peer), (peer, MINE)):
        with pytest.raises(
            IncompatiblePeer, match="softnpu moves bytes only between processes of one user on one"
        ) as refused:
            check_reach(mine, other)
        boot = host.partition(":")[0]
        assert "process 1 of user 0 on the machine with boot id boot" in str(refused.value)
        assert f"process 2 {who} the machine with boot id {boot}" in str(refused.value)


def test_a_strangers_words_cannot_break_a_line() -> None:
    with pytest.raises(IncompatiblePeer) as refused:
        check_reach(MINE, replace(PEER, host="other\n:0\n"))
    assert "\n" not in str(refused.value)


def test_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_reach, "PROC", Path("/proc"))
    here = replace(MINE, process=os.getpid())
    assert networks_of(here, replace(here, process=os.getppid())) == ""
