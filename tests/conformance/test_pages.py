"""Over HCCS device memory is exported from the start of a page: what starts elsewhere is refused before a link is ruined."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    ParamInvalid,
    Placement,
)
from aiodatadist._device import Device
from aiodatadist._transport import Region, open_transport
from aiodatadist._transport.hccl import PINNED
from tests import children
from tests.strict.marks import any_memory

PAGE = 2 << 20
DESC = CacheDesc(1, [4, 1024], DataType.DT_UINT8)
HOST = CacheDesc(1, [4, 1024], DataType.DT_UINT8, Placement.HOST)
POOL = '{"memory_size": 1048576}'


async def said(registering: Any) -> str:
    try:
        await registering
    except ParamInvalid as error:
        words = str(error.args[0])
        return f"{words.partition(' at ')[0]}:{words.partition(': ')[2]} ({error.hint})"
    return "taken"


async def program() -> None:
    options: dict[str, Any] = {"listen": "127.0.0.1:0", "mem_pool_cfg": POOL, "host_mem_pool_cfg": POOL}
    async with LLMDataDist(LLMRole.MIX, 1, LLMConfig(**options)) as datadist:
        manager, device = datadist.cache_manager, datadist.device
        large, small = device.allocate(4 * PAGE), device.allocate(65536)
        host = device.allocate(65536, Placement.HOST)
        for desc, address in (
            (DESC, large.address),
            (DESC, large.address + PAGE),
            (DESC, large.address + 2 * PAGE + 4096),
            (DESC, small.address),
            (DESC, small.address + 8192),
            (DESC, small.address + 16384 + 64),
            (HOST, host.address + 64),
        ):
            print(await said(manager.register_blocks_cache(desc, [address], None, True)))
        print(await said(manager.register_cache(DESC, [large.address + 3 * PAGE + 64], [], True)))
        print(await said(manager.register_cache(DESC, [large.address + 3 * PAGE + 64], [], False)))
        await manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))


REFUSED = (
    "4096 bytes of DEVICE memory:over HCCS every tensor must start with a page (align each tensor to 2 MiB, take memory of "
    "a pool, or set HCCL_INTRA_ROCE_ENABLE=1 at both ends)"
)


@pytest.mark.parametrize(
    ("strict", "refused"), [("", set[int]()), ("roce", set[int]()), ("hccs", {2, 5, 7})], ids=["free", "roce", "hccs"]
)
async def test_memory_that_does_not_start_with_a_page(strict: str, refused: set[int]) -> None:
    process = await children.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        env={**os.environ, "SOFTNPU_STRICT": strict},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().splitlines() == [REFUSED if i in refused else "taken" for i in range(9)]


@any_memory
@pytest.mark.usefixtures("no_leaks")
async def test_host_memory_that_is_not_the_runtimes_is_warned_of_on_an_npu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ordinary = np.zeros(65536, np.uint8)
    async with await Device.open(0) as device:
        transport = open_transport("hccl", device)
        pinned = device.allocate(65536, Placement.HOST)
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime, "name", "ascend")
            for address in (pinned.address, ordinary.ctypes.data):
                await transport.register([Region(address, 65536, Placement.HOST)])
            await transport.aclose()
    assert caplog.messages == [
        f"65536 bytes of HOST memory at {ordinary.ctypes.data:#x} are not from aclrtMallocHost, so links over "
        f"RoCE may fail; {PINNED}"
    ]


async def host() -> None:
    """Register pinned memory, then ordinary memory, with a transport; then with HCCL behind its back."""
    ordinary = np.zeros(65536, np.uint8)
    async with await Device.open(0) as device:
        transport = open_transport("hccl", device)
        pinned = device.allocate(65536, Placement.HOST)
        for address in (pinned.address, ordinary.ctypes.data):
            try:
                await transport.register([Region(address, 65536, Placement.HOST)])
                print("taken")
            except ParamInvalid as error:
                print(re.sub("0x[0-9a-f]+", "ADDRESS", f"{error.args[0]} ({error.hint})"))
        await transport.aclose()


UNPINNED = (
    "65536 bytes of HOST memory at ADDRESS are not pinned: if links may be over HCCS, HOST memory must be from "
    f"aclrtMallocHost ({PINNED})"
)


@pytest.mark.parametrize(
    ("strict", "said"), [("", "taken"), ("roce", "taken"), ("hccs", UNPINNED), ("aicpu", UNPINNED)]
)
async def test_host_memory_that_is_not_pinned(strict: str, said: str) -> None:
    process = await children.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        "host",
        env={**os.environ, "SOFTNPU_STRICT": strict},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().splitlines() == ["taken", said]


if __name__ == "__main__":
    asyncio.run(host() if sys.argv[1:] == ["host"] else program())
