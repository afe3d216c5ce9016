"""Programs that say nothing of the runtime do on an NPU what they do on softnpu, which has the vendor's names here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiodatadist._testing.ports import free_port
from tests import children, vendor_names
from tests.test_readme import program

OPEN = """
import asyncio, sys
from aiodatadist.testing import open_cluster

async def main():
    async with open_cluster(1, device_id=0) as prompt:
        print(prompt.datadist.listen_address[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""

LINK = """
import asyncio, logging, sys
from aiodatadist import LLMClusterInfo
from aiodatadist.testing import open_cluster

async def main():
    logging.basicConfig(format="%(message)s")
    async with open_cluster(2, device_id=0) as decoder:
        peer = LLMClusterInfo(1)
        peer.append_remote_ip_info("127.0.0.1", int(sys.argv[1]))
        print(await decoder.datadist.link_clusters([peer], 30_000))

asyncio.run(main())
"""

SUPER_POD = """
import asyncio
from aiodatadist._native.runtime import Runtime
from aiodatadist._device import Device
from aiodatadist._transport.hccl import HcclTransport

async def main():
    async with await Device.open(1) as device:
        device.runtime.chip = "Ascend910_9392"
        transport = HcclTransport(device)
        found = transport.endpoint
        print(found.device_id, found.super_pod_id, found.super_device_id)
        await transport.aclose()

asyncio.run(main())
"""

HERE = """
import asyncio
from aiodatadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole

async def main():
    config = LLMConfig(mem_pool_cfg='{"memory_size": 1048576}')
    async with LLMDataDist(LLMRole.PROMPT, 1, config) as datadist:
        manager = datadist.cache_manager
        desc = CacheDesc(1, [16, 64], DataType.DT_UINT8)
        cache = await manager.allocate_blocks_cache(desc)
        for attempt in (manager.arrays, manager.tensors):
            try:
                attempt(cache)
            except LLMException as error:
                print(error)
        try:
            await manager.register_blocks_cache(desc, [bytearray(1024)])
        except LLMException as error:
            print(error)

asyncio.run(main())
"""


def run(script: str, folder: Path, *arguments: str, strict: str = "", **own: str) -> subprocess.CompletedProcess[str]:
    environment = {**vendor_names.environment(folder, strict), **own}
    command = [sys.executable, "-c", script, *arguments]
    return children.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@contextmanager
def opened(script: str, folder: Path, strict: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that prints a line when it is ready, and ends when its stdin does."""
    environment = vendor_names.environment(folder, strict)
    command = [sys.executable, "-c", script]
    with children.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def names() -> Iterator[Path]:
    with vendor_names.shared_folder() as folder:
        vendor_names.install(folder)
        yield folder


@pytest.mark.parametrize("strict", ["hccs", "roce", "aicpu"])
def test_two_processes_on_one_npu_are_not_linked_and_told_why(names: Path, strict: str) -> None:
    with opened(OPEN, names, strict) as prompt:
        assert prompt.stdout is not None
        done = run(LINK, names, prompt.stdout.readline().strip(), strict=strict)
    assert "LLM_PARAM_INVALID" in done.stdout, done.stderr
    assert "both ends are device 0 of server" in done.stderr


def test_the_ids_of_a_super_pod_are_the_runtimes(names: Path) -> None:
    done = run(SUPER_POD, names)
    assert done.stdout == "1 0 1\n", done.stderr


def test_a_runtime_that_does_not_know_super_pods_asks_for_them(names: Path) -> None:
    unknown = "from aiodatadist._native.runtime import Runtime\nRuntime.super_pod = lambda self, index: None\n"
    done = run(unknown + SUPER_POD, names)
    assert "CANN reports its ids from version 8.5 on" in done.stderr
    assert "set LLMConfig.local_comm_res: version 1.2" in done.stderr


@pytest.mark.parametrize("strict", ["hccs", "roce", "aicpu"])
def test_the_readmes_two_programs_run_as_they_are(names: Path, strict: str) -> None:
    vendor_names.install_tool(names)
    port = free_port()
    with opened(program("prefill.py", port), names, strict) as prefill:
        assert prefill.stdout is not None
        assert prefill.stderr is not None
        assert prefill.stdout.readline() == "ready\n", prefill.stderr.read()
        done = run(program("decode.py", port), names, strict=strict)
        assert done.stdout == "32768 bytes [1, 2, 3, 4]\n", done.stderr
        assert prefill.stdout.read() == "cluster 2: request 7 is here\n", prefill.stderr.read()
        assert prefill.wait(30) == 0


def test_what_an_npu_does_not_show_the_host_says_what_to_do(names: Path) -> None:
    done = run(HERE, names)
    arrays, tensors, registered = done.stdout.splitlines()
    assert "device memory of an NPU has no view on the host" in arrays
    assert "swap_blocks" in arrays
    assert "[LLM_FEATURE_NOT_ENABLED]" in tensors  # torch, torch_npu or torchair, by name
    assert "is on cpu: a cache of Placement.DEVICE needs memory of the NPU" in registered
    assert "swap_blocks" in registered
