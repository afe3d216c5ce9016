"""Engines as they are deployed: behind NAT, in containers, several data-parallel ones with the same settings."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from aiodatadist import new_lease_name
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.peers import PeerRule, Peers
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.sglang.settings import SglangSettings
from aiodatadist._adapters.vllm.model import Model
from aiodatadist._testing.ports import free_port
from tests.adapters.kv_memory import opaque
from tests.adapters.test_block_service import BLOCKS, BYTES, LAYOUT, PROMPT, ended_in, order

EVERYWHERE = ("0.0.0.0", "::", "0:0::0", "::ffff:0.0.0.0")


@pytest.mark.parametrize("host", EVERYWHERE)
@pytest.mark.parametrize("kind", [Settings, SglangSettings])
def test_an_address_that_cannot_be_dialled_is_not_advertised(kind: type[Settings], host: str) -> None:
    with pytest.raises(ValidationError, match=r"stands for all addresses of this machine.*set advertise_host"):
        kind(host=host)
    assert kind(host=host, advertise_host="prefill-0.prefill").address(0, 5) == ("prefill-0.prefill", 5)


@pytest.mark.parametrize("host", [*EVERYWHERE, "no host", ""])
def test_only_an_address_that_can_be_dialled_is_advertised(host: str) -> None:
    with pytest.raises(ValidationError, match=r"advertise_host.*|at least 1"):
        Settings(host="10.0.0.7", advertise_host=host)


@pytest.mark.parametrize("host", EVERYWHERE)
def test_no_network_of_peers_has_an_address_that_cannot_be_dialled(host: str) -> None:
    peers = Peers([PeerRule(host="0.0.0.0/0"), PeerRule(host="::/0")])
    assert peers.why_not(host, 26000) == f"{host} is not in peers"
    assert peers.why_not("10.0.0.1", 26000) == ""


def test_a_forwarded_port_is_not_any_free_one() -> None:
    with pytest.raises(ValidationError, match="advertise_port is 31000 and port is 0, any free port: set port"):
        Settings(advertise_port=31000)
    settings = Settings(port=5600, advertise_port=31000)
    assert [settings.address(rank, 5600 + rank) for rank in (0, 3)] == [("127.0.0.1", 31000), ("127.0.0.1", 31003)]


@contextmanager
def forwarded(to: tuple[str, int]) -> Iterator[int]:
    """Forward connections at another port, as NAT does."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(to)
            except OSError:
                return
            opened.extend((client, server))
            for pair in ((client, server), (server, client)):
                Thread(target=carry, args=pair, daemon=True).start()

    accepting = Thread(target=serve, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in opened:
            each.close()
        accepting.join()


def test_an_engine_is_linked_at_the_address_that_it_advertises() -> None:
    port = free_port()
    with ExitStack() as stack:
        outside = stack.enter_context(forwarded(("127.0.0.1", port)))
        behind = Settings(port=port, advertise_host="localhost", advertise_port=outside)
        made = [behind, Settings(device_id=1, peers=(PeerRule(host="localhost"),))]
        owner, puller = (stack.enter_context(closing(BlockService(each))) for each in made)
        arrays = [np.full((BLOCKS, BYTES), number, np.uint8) for number in (7, 8)]
        address = owner.open(opaque([[arrays[0]]], BLOCKS), LAYOUT)
        puller.open(opaque([[arrays[1]]], BLOCKS), LAYOUT)
        assert (address.host, address.port) == ("localhost", outside)
        lease = new_lease_name()
        owner.keep("r", lease, [3, 9], PROMPT)
        puller.pull(order("r", lease, address))
        ended = ended_in(puller, "received", "r")
        assert ended.failed == {}
        assert [int(arrays[1][block, 0]) for block in (0, 1, 2)] == [7, 7, 8]


def parallel(**given: Any) -> Any:
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "rank": 0, **given}
    size = sizes["pipeline_parallel_size"] * sizes["tensor_parallel_size"]
    return SimpleNamespace(**{"world_size": size, "data_parallel_rank": 0, **sizes})


def model_of(**given: Any) -> Model:
    spec = type("FullAttentionSpec", (SimpleNamespace,), {})(block_size=16, num_kv_heads=2)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=8)
    return Model.of(SimpleNamespace(parallel_config=parallel(**given)), config, "Connector")


def test_every_worker_of_every_data_parallel_engine_has_its_own_port_cluster_id_and_device() -> None:
    settings = Settings(port=5600, cluster_id=100, device_id=2, host="10.0.0.7", advertise_port=31000)
    found = []
    for engine in range(3):
        for rank in range(2):
            model = model_of(
                tensor_parallel_size=2, rank=rank, data_parallel_index=engine, data_parallel_rank_local=engine
            )
            moved = settings.moved(model.first, model.first_device)
            listening = moved.port + model.rank
            device = moved.device_id + model.rank
            found.append((moved.own_cluster_id(model.rank), listening, device, moved.address(model.rank, listening)[1]))
    assert found == [(100 + n, 5600 + n, 2 + n, 31000 + n) for n in range(6)]


def test_an_engine_on_the_second_machine_has_the_devices_from_the_first_one_on() -> None:
    model = model_of(tensor_parallel_size=4, rank=1, data_parallel_index=5, data_parallel_rank_local=1)
    moved = Settings(port=5600, cluster_id=100).moved(model.first, model.first_device)
    assert (moved.own_cluster_id(model.rank), moved.port + model.rank, moved.device_id + model.rank) == (121, 5621, 5)


def test_what_was_not_set_is_not_derived() -> None:
    model = model_of(data_parallel_index=3)
    moved = Settings().moved(model.first, model.first_device)
    assert (moved.port, moved.advertise_port, moved.cluster_id, moved.device_id) == (0, None, None, 3)
    assert model_of(rank=0).first == 0, "an older engine has no such number"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"port": 65530}, "port is 65530: worker 6 would have 65536; the limit is 65535"),
        ({"port": 1, "advertise_port": 65530}, "advertise_port is 65530: worker 6 would have 65536"),
        ({"cluster_id": 2**62 - 3}, "cluster_id is .*: worker 6 would have"),
    ],
)
def test_a_port_or_cluster_id_that_cannot_be_is_named(given: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings(**given).moved(6, 6)  # type: ignore[arg-type]


def test_two_data_parallel_engines_with_the_same_settings_start_and_pull_from_each_other() -> None:
    first, second = free_port(), free_port()
    settings = Settings(port=min(first, second), cluster_id=70_000)
    step = abs(first - second)
    with ExitStack() as stack:
        made = [settings.moved(number * step, number) for number in range(2)]
        owner, puller = (stack.enter_context(closing(BlockService(each))) for each in made)
        arrays = [np.full((BLOCKS, BYTES), number, np.uint8) for number in (7, 8)]
        address = owner.open(opaque([[arrays[0]]], BLOCKS), LAYOUT)
        puller.open(opaque([[arrays[1]]], BLOCKS), LAYOUT)
        lease = new_lease_name()
        owner.keep("r", lease, [3, 9], PROMPT)
        puller.pull(order("r", lease, address))
        ended = ended_in(puller, "received", "r")
        assert ended.counters["pull_done"] == 1
