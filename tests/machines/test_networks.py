"""Machines: what joins them carries real TCP, and nothing is left of them."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import children
from tests.machines import needs, networks
from tests.machines.inside import FOLDER
from tests.machines.networks import PORT, Machine, address, cable, forward, leftovers, machines, route, switch
from tests.machines.sockets import connected, dial, listen, sent

BYTES = random.Random(1).randbytes(200_000)


def mtu_of(machine: Machine, device: str) -> int:
    return machine.inside(lambda: int(Path(f"/proc/sys/net/ipv6/conf/{device}/mtu").read_text(encoding="ascii")))


@pytest.mark.parametrize("mtu", [1500, 9000])
@pytest.mark.parametrize("family", [4, 6])
def test_a_cable_carries_tcp(family: int, mtu: int) -> None:
    with machines("a", "b") as (a, b):
        cable(a, b, mtu=mtu)
        assert [mtu_of(each, "net1") for each in (a, b)] == [mtu, mtu]
        with connected(a, b, address(1, 2, family)) as (ours, theirs):
            assert sent(BYTES, ours, theirs) == BYTES
            assert sent(BYTES, theirs, ours) == BYTES
            segment = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            assert mtu - 80 < segment < mtu


def test_machines_reach_nothing_that_they_are_not_joined_to() -> None:
    with machines("a", "b", "c") as (a, b, c):
        cable(a, b)
        with listen(c, "0.0.0.0"), pytest.raises(OSError, match="unreachable"):
            dial(a, address(2, 1))
        with pytest.raises(ConnectionRefusedError):
            dial(a, "127.0.0.1")


def test_a_cable_that_is_pulled_out_carries_nothing_until_it_is_back() -> None:
    with machines("a", "b") as (a, b):
        cable(a, b)
        with connected(a, b, address(1, 2)) as (ours, theirs):
            b.ip("link set net1 down")
            ours.sendall(BYTES[:1000])
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            theirs.settimeout(50)
            b.ip("link set net1 up")
            assert theirs.recv(1000, socket.MSG_WAITALL) == BYTES[:1000]


def test_a_switch_joins_three() -> None:
    with machines("hub", "a", "b", "c") as (hub, *three):
        switch(hub, *three)
        for client in range(3):
            server = (client + 1) % 3
            with connected(three[client], three[server], address(1, server + 1)) as (ours, theirs):
                assert sent(BYTES, ours, theirs) == BYTES
                assert theirs.getpeername()[0] == address(1, client + 1)


@pytest.mark.parametrize("family", [4, 6])
def test_a_router_joins_two_networks_of_different_mtu(family: int) -> None:
    with machines("a", "router", "b") as (a, router, b):
        route(a, router, b, mtus=(9000, 1500))
        with connected(a, b, address(2, 1, family)) as (ours, theirs):
            assert sent(BYTES, ours, theirs) == BYTES
            assert theirs.getpeername()[0] == address(1, 1, family)


@pytest.mark.usefixtures("nft")
def test_a_forwarded_port_leads_to_a_machine_that_cannot_be_seen() -> None:
    with machines("a", "router", "b") as (a, router, b):
        cable(a, router)
        cable(router, b, net=2)
        router.set("ipv4/ip_forward", 1)
        forward(router, 4000, address(2, 2))
        with listen(b, address(2, 2)) as listener, dial(a, address(1, 2), 4000) as ours:
            theirs, seen = listener.accept()
            with theirs:
                assert sent(BYTES, ours, theirs) == BYTES
                assert seen[0] == address(2, 1), "the router's"
        with pytest.raises(OSError, match="unreachable"):
            dial(a, address(2, 2))


def test_rules_that_the_kernel_refuses_are_reported() -> None:
    with machines("a") as (a,), pytest.raises(AssertionError, match=r"ip -n aiodatadist-.*-a -batch -: .*nowhere"):
        a.ip("link set nowhere up")


# ---- nothing is left ----


def of_this_process() -> list[str]:
    return [entry.name for entry in FOLDER.iterdir() if entry.name.startswith(f"aiodatadist-{os.getpid()}-")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_machines_are_removed_whatever_happens(error: type[BaseException]) -> None:
    def fail() -> None:
        with machines("a", "b"):
            assert len(of_this_process()) == 2
            raise error

    with pytest.raises(error):
        fail()
    assert of_this_process() == []


def test_a_name_that_is_taken_leaves_no_other_machine() -> None:
    with machines("b"), pytest.raises(AssertionError, match="File exists"), machines("a", "b"):
        pass
    assert of_this_process() == []


KILLED = """
from tests.machines.networks import cable, machines
with machines("a", "b") as (a, b):
    cable(a, b)
    print(a.namespace, b.namespace, flush=True)
    input()
"""


def test_what_a_killed_process_left_is_found_and_removed() -> None:
    with machines("ours") as (ours,):
        process = children.Popen(
            [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            names = process.stdout.readline().split()
            assert not set(names) & set(leftovers()), "their process runs"
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert set(names) <= set(leftovers())
        networks.remove(leftovers())
        assert not set(names) & {entry.name for entry in FOLDER.iterdir()}
        assert (FOLDER / ours.namespace).exists()


def test_another_process_with_the_same_number_does_not_keep_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines("a") as (a,):
        monkeypatch.setattr(networks, "started_at", lambda pid: "1")
        assert a.namespace in leftovers()


# ---- where there can be none ----


def without_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


def without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def without_tun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "TUN", Path("/dev/net/none"))


def without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **_: object) -> None:
        raise AssertionError("ip netns add: mount --make-shared /run/netns failed: Operation not permitted")

    monkeypatch.setattr(networks, "_ip", refuse)


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (without_ip, "network namespaces need ip: apt-get install iproute2"),
        (without_root, "network namespaces need root"),
        (without_tun, "network namespaces are there, but not /dev/net/none"),
        (without_permission, "network namespaces cannot be made: .*Operation not permitted"),
    ],
)
def test_a_skip_says_why_and_is_a_failure_where_the_tests_are_required(
    without: Callable[[pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.why_not.cache_clear()
    without(monkeypatch)
    why = needs.why_not()
    needs.why_not.cache_clear()
    assert re.fullmatch(reason, why)
    monkeypatch.delenv(needs.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=reason):
        needs.need(why)
    monkeypatch.setenv(needs.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=reason):
        needs.need(why)


def test_nothing_is_skipped_here_without_a_reason() -> None:
    needs.need("")
    assert PORT > 1024
