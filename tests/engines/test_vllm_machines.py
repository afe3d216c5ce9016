"""vLLM engines on two machines: one prefills, the other decodes, and pulls blocks over TCP.

The two are network namespaces, and the connectors are configured as for one machine, but for addresses and a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engines import BLOCK, MODEL, Answer, Engine, Router, opened, prompts
from tests.engines.test_vllm import TOKENS, Watch, expected
from tests.keys import HEX, folder_of
from tests.machines.needs import need, why_not
from tests.machines.networks import PORT, Machine, address, cable, machines

REQUESTS = 12
BLOCK_BYTES = 2 * MODEL["num_hidden_layers"] * BLOCK * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4
"""The bytes of a block: keys and values of each layer, in float32."""
HELD = 24
"""Descriptors that a first link may add: its data connections, and what their threads wait with, beside those of any link."""
WHERE: Answer = {"host": address(1, 1), "port": PORT, "cluster_id": 4711}
"""The address of the prefill engine."""


def on(machine: Machine) -> list[str]:
    """Return the command that starts another one on a machine, where vLLM finds only loopback and one network."""
    return [
        *("ip", "netns", "exec", machine.namespace),
        *("env", "VLLM_HOST_IP=127.0.0.1", "GLOO_SOCKET_IFNAME=lo"),
    ]


def sent(machine: Machine) -> int:
    """Return the bytes that a machine has sent to the other one."""
    lines = machine.inside(lambda: Path("/proc/thread-self/net/dev").read_text(encoding="ascii")).splitlines()
    (figures,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("net1:"))
    return int(figures[8])


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Engine, Engine]]:
    """Start a prefill engine on a machine, and a decode engine on another."""
    need(why_not())
    trust = [str(folder_of(tmp_path_factory.mktemp("trust") / "folder", f"first {HEX}")) for _ in range(2)]
    with machines("a", "b") as (a, b):
        cable(a, b)
        others = {"push": True, "trust": trust[0], "peers": [], "lease_seconds": 30}
        prefill = Engine(model, model / "far_prefill.log", {**WHERE, **others}, inside=on(a))
        settings = {"host": address(1, 2), "trust": trust[1], "peers": ["10.77.1.0/24"], "pull_seconds": 30}
        decode = Engine(model, model / "far_decode.log", settings, inside=on(b))
        with opened(prefill, decode):
            yield a, prefill, decode


def test_pulled_blocks_cross_the_network(alone: Engine, apart: tuple[Machine, Engine, Engine]) -> None:
    machine, prefill, decode = apart
    wanted = prompts(REQUESTS, 21)
    watch, before = Watch(prefill, decode, descriptors=HELD), sent(machine)
    assert Router(prefill, decode).serve("r", wanted, TOKENS) == expected(alone, wanted)
    watch.nothing_is_kept()
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in wanted)
    assert (watch.counted("pull_done"), watch.counted("pull_failed")) == (REQUESTS, 0)
    assert watch.counted("pulled_blocks") == blocks
    assert sent(machine) - before >= blocks * BLOCK_BYTES, "no other way than the network"
