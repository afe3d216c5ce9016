"""A process that gets no more memory, addresses, bytes of a file or descriptors is told so, and goes on when it may again."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    FeatureNotEnabled,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    Placement,
)
from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsException
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from tests import children
from tests.strict.marks import any_memory

MIB = 1 << 20
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
PR_SET_NO_NEW_PRIVS = 38
LOOPS_OWN = ("asyncio_", "ThreadPoolExecutor-")
"""Names of threads, as asyncio and uvloop begin them."""
DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)


@contextmanager
def limited(kind: int, amount: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def addresses_in_use() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def end_calls() -> None:
    """Join threads of calls: a call whose result is here may have its thread on its way out."""
    for each in threading.enumerate():
        if each.name == "aiodatadist call":
            each.join(10)


def threads() -> int:
    """Count this process's threads, but for ended calls and the event loop's own pool.

    That pool looks names up and starts another thread if the first is not idle yet.
    """
    end_calls()
    pool = sum(each.name.startswith(LOOPS_OWN) for each in threading.enumerate())
    return len(list(Path("/proc/self/task").iterdir())) - pool


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    filling: list[int] = []
    with limited(resource.RLIMIT_NOFILE, 200):
        try:
            while True:
                filling.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for _ in range(spare):
                os.close(filling.pop())
        try:
            yield
        finally:
            for number in filling:
                os.close(number)


async def open_and_close(pool: int = MIB, **options: Any) -> None:
    config = LLMConfig(mem_pool_cfg={"memory_size": pool}, **options)
    async with LLMDataDist(LLMRole.MIX, 1, config) as datadist:
        await datadist.cache_manager.allocate_blocks_cache(DESC)


async def save_and_close() -> None:
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with await ContextCache.open(config, f"memory:?bytes={4 * MIB}") as cache:
        await cache.register_kvcache([[np.zeros((8, 4, 16), np.float16)]])
        await cache.save([1], chunks=[[(0, 4)]])


async def raised(call: Callable[[], Awaitable[object]]) -> list[str]:
    """Return the class and the words of what a call raises. An untyped exception is let through."""
    try:
        await call()
    except (LLMException, EmsException) as error:
        return [type(error).__name__, str(error)]
    return []


# ---- programs: each in a process of its own, with limits ----


async def files_of_no_size() -> Any:
    """Memory of softnpu is in memfds."""
    await open_and_close()
    with limited(resource.RLIMIT_FSIZE, 4096):
        found = [await raised(open_and_close), await raised(save_and_close)]
    await open_and_close()
    await save_and_close()
    return found


async def a_filter_without_memfds() -> Any:
    """Refuse memfds, as some containers' profiles do."""
    await open_and_close()
    refuse_call(MEMFD_CREATE[platform.machine()])
    return [await raised(open_and_close)]


def refuse_call(number: int) -> None:
    """Let this kernel call fail with EPERM from now on, in this thread and all that it starts."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    lines = [(load, 0, 0, 0), (jump_if_equal, 0, 1, number), (give, 0, 0, refuse), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    seccomp, set_filter, all_threads = {"x86_64": 317, "aarch64": 277}[platform.machine()], 1, 1
    assert libc.syscall(seccomp, set_filter, all_threads, program) == 0, os.strerror(ctypes.get_errno())


async def no_addresses() -> Any:
    """Limit the host's addresses; those of devices were reserved before."""
    await open_and_close()
    with limited(resource.RLIMIT_AS, addresses_in_use() + 64 * MIB):  # threads have enough
        found = [await raised(lambda: open_and_close(host_mem_pool_cfg={"memory_size": 256 * MIB}))]
    await open_and_close(host_mem_pool_cfg={"memory_size": 256 * MIB})
    return found


async def no_addresses_from_the_start() -> Any:
    with limited(resource.RLIMIT_AS, addresses_in_use() + 512 * MIB):
        found = [await raised(open_and_close)]
    await open_and_close()
    return found


async def hardly_any_addresses() -> Any:
    """Leave so few addresses that threads start on stacks of earlier ones and some find no memory for their first step.

    The rest of the process depends on malloc: all may go well, and Python's own MemoryError may come anywhere.
    """
    await open_and_close()
    before, found = open_descriptors(), []
    for spare in (0, 8 << 10, 256 << 10):
        with limited(resource.RLIMIT_AS, addresses_in_use() + spare):
            try:
                found.append(await raised(open_and_close))
            except MemoryError as error:
                found.append([type(error).__name__, "no thread can be started"])
        await open_and_close()
    return [*found, open_descriptors() - before]


def without_pages(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map a file of 1 MiB on a file system of 64 KiB. If none is mounted, cut the file off after it was mapped."""
    with path.open("w+b") as file:
        file.truncate(MIB)
        mapped = mmap.mmap(file.fileno(), MIB)
        if not path.parent.is_mount():
            file.truncate(0)
    return np.frombuffer(mapped, np.uint8)


async def shared_memory_that_is_full() -> Any:
    desc = CacheDesc(1, [16, 64 << 10], DataType.DT_UINT8, Placement.HOST)
    async with open_cluster(1) as cluster:
        manager, found = cluster.datadist.cache_manager, []
        for number in range(2):
            tensor = without_pages(Path(os.environ["FULL_FOLDER"], f"kv{number}"))
            register = partial(manager.register_blocks_cache, desc, [tensor], remote_accessible=True)
            found.append(await raised(register))
        await cluster.blocks(DESC)
    return found


async def a_device_without_memory() -> Any:
    """Open clusters on a device that has 4 MiB, which SOFTNPU_DEVICE_MEMORY sets."""
    found = [await raised(lambda: open_and_close(8 * MIB))]
    async with AsyncExitStack() as stack:
        first = LLMDataDist(LLMRole.MIX, 1, LLMConfig(mem_pool_cfg={"memory_size": 3 * MIB}))
        await stack.enter_async_context(first)
        second = LLMDataDist(LLMRole.MIX, 2, LLMConfig(mem_pool_cfg={"memory_size": 2 * MIB}))
        found.append(await raised(second.init))
        await first.finalize()
        await second.init()
        await second.finalize()
    return found


async def links_without_descriptors() -> Any:
    """Link without descriptors. Whichever end lacks one, no link is made, and the next attempt makes it."""
    await attempts(())  # what is opened once in a process is
    before = open_descriptors()
    found = await attempts(range(0, 16, 2))
    return [*found, ["left open", open_descriptors() - before]]


async def attempts(spares: Iterable[int]) -> list[Any]:
    found = []
    async with open_cluster(1) as owner, open_cluster(2, device_id=1) as puller:
        source, target = await owner.blocks(DESC), await puller.blocks(DESC)
        await link_pull_unlink(owner, puller, target)
        for spare in spares:
            with few_descriptors(spare):
                linked = await puller.datadist.link_clusters([cluster_info(owner)], 1500)
                found.append([linked[0].name, *(str(error) for error in linked.errors if error)])
            if linked[0] is LLMStatusCode.LLM_SUCCESS:
                await puller.datadist.unlink_clusters([cluster_info(owner)])
        await link_pull_unlink(owner, puller, target)
        assert source.tensor_addrs
    return found


async def link_pull_unlink(owner: Cluster, puller: Cluster, target: Any) -> None:
    linked = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
    assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
    report = await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [1], [2])
    assert report.bytes == 2 * 4096
    await puller.datadist.unlink_clusters([cluster_info(owner)])
    with suppress(NotLinked):  # it has ended already
        await owner.datadist.wait_link_closed(2)


PROGRAMS = {
    each.__name__: each
    for each in (
        files_of_no_size,
        a_filter_without_memfds,
        no_addresses,
        no_addresses_from_the_start,
        hardly_any_addresses,
        shared_memory_that_is_full,
        a_device_without_memory,
        links_without_descriptors,
    )
}


def started(program: Callable[[], Awaitable[Any]], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.test_full_memory", program.__name__]
    env = {**os.environ, **environment}
    return children.run(command, capture_output=True, text=True, check=False, timeout=80, env=env)


def run(program: Callable[[], Awaitable[Any]], **environment: str) -> Any:
    done = started(program, **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_files_that_may_not_grow_are_told_as_memory_that_is_not_there() -> None:
    (cluster, words), (cache, other) = run(files_of_no_size)
    assert cluster == OutOfMemory.__name__
    assert "sizing a memfd of 1048576 bytes: File too large" in words
    assert "RLIMIT_FSIZE (ulimit -f) is 4096 bytes" in words
    assert "raise the limit that is named" in words
    assert cache.startswith("Ems")
    assert "RLIMIT_FSIZE (ulimit -f) is 4096 bytes" in other


@pytest.mark.skipif(platform.machine() not in MEMFD_CREATE, reason="the number of the call is not known")
def test_a_filter_that_refuses_memfds_is_told_as_what_it_is() -> None:
    for kind, words in run(a_filter_without_memfds):
        assert kind == FeatureNotEnabled.__name__, words
        assert "memfd_create is refused: Operation not permitted" in words
        assert "seccomp" in words
        assert "smaller" not in words


@pytest.mark.parametrize("program", [no_addresses, no_addresses_from_the_start])
def test_addresses_that_are_used_up_are_told_with_their_limit(program: Callable[[], Awaitable[Any]]) -> None:
    for kind, words in run(program, MALLOC_ARENA_MAX="1"):
        assert kind == OutOfMemory.__name__, words
        assert "RLIMIT_AS" in words


def test_with_hardly_any_address_left_an_init_ends_all_the_same() -> None:
    done = started(hardly_any_addresses)  # stderr has Python's own words for threads that could not begin
    assert done.returncode == 0, done.stderr
    *found, left_open = json.loads(done.stdout)
    for words in found:
        assert not words or "no thread can be started" in words[1] or words[0] == OutOfMemory.__name__, words
    assert left_open == 0


@pytest.fixture(params=["a file that is shorter", "a file system that is full"])
def full_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "a file that is shorter":
        yield tmp_path
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", str(tmp_path)]
    if os.geteuid() or children.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield tmp_path
    children.run(["umount", str(tmp_path)], check=True)


@any_memory
def test_shared_memory_without_pages_is_refused_and_no_transfer_touches_it(full_folder: Path) -> None:
    for kind, words in run(shared_memory_that_is_full, FULL_FOLDER=str(full_folder)):
        assert kind == OutOfMemory.__name__, words
        assert "has pages for which there is no memory" in words


def test_a_device_without_memory_says_how_much_it_has() -> None:
    for kind, words in run(a_device_without_memory, SOFTNPU_DEVICE_MEMORY=str(4 * MIB)):
        assert kind == OutOfMemory.__name__, words
        assert str(4 * MIB) in words


def test_a_link_that_lacks_descriptors_is_not_made_and_the_next_one_is() -> None:
    *found, left = run(links_without_descriptors)
    assert found[0][0] == "LLM_LINK_FAILED"
    assert found[0][1].endswith("Too many open files: RLIMIT_NOFILE is 200 [LLM_LINK_FAILED]"), found[0]
    assert found[-1][0] == "LLM_SUCCESS", found
    for status, *errors in found:
        assert (status == "LLM_SUCCESS") == (not errors)
    assert left == ["left open", 0]


if __name__ == "__main__":
    print(json.dumps(anyio.run(PROGRAMS[sys.argv[1]])))
