"""The memory limit of a container: found in either hierarchy, and what exceeds it is refused before the kernel acts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from aiodatadist import LLMConfig, LLMDataDist, LLMRole, OutOfMemory
from aiodatadist._device import memory_limit as module
from aiodatadist._device.memory_limit import MemoryLimit, memory_limit

MIB = 1 << 20
UNLIMITED_V1 = str((1 << 63) - 4096)

Container = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    """Make control groups: the process's own entry, and the files of all groups."""

    def make(own: str, files: Mapping[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        monkeypatch.setattr(module, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(module, "GROUPS", tmp_path / "groups")

    return make


def test_the_smallest_limit_on_the_way_up_counts(container: Container) -> None:
    container(
        "0::/pods/one/engine\n",
        {
            "pods/one/engine/memory.max": "max",
            "pods/one/memory.max": str(64 * MIB),
            "pods/one/memory.stat": "anon 1000\nfile 999999\nshmem 234",
            "pods/memory.max": str(128 * MIB),
        },
    )
    found = memory_limit()
    assert found is not None
    assert found[:2] == (64 * MIB, 1234)
    assert found.file.endswith("pods/one/memory.max")


def test_a_container_that_sees_its_own_group_as_the_root(container: Container) -> None:
    container("0::/\n", {"memory.max": str(32 * MIB)})
    assert (found := memory_limit()) is not None
    assert found[:2] == (32 * MIB, 0)


@pytest.mark.parametrize("folder", ["memory/docker/abc/", "memory/"], ids=["by its path", "at the mount's root"])
def test_the_older_hierarchy(container: Container, folder: str) -> None:
    container(
        "4:memory:/docker/abc\n1:name=systemd:/\n0::/\n",
        {
            f"{folder}memory.limit_in_bytes": str(16 * MIB),
            f"{folder}memory.stat": "rss 5\ntotal_rss 1000\ntotal_shmem 24",
        },
    )
    assert (found := memory_limit()) is not None
    assert found[:2] == (16 * MIB, 1024)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {}),
        ("0::/a\n", {"a/memory.max": "max"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED_V1}),
        ("0::/a\n", {"a/memory.max": "what is this"}),
        ("", {}),
    ],
)
def test_no_limit(container: Container, own: str, files: Mapping[str, str]) -> None:
    container(own, files)
    assert memory_limit() is None


def test_a_machine_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OWN_GROUPS", tmp_path / "absent")
    assert memory_limit() is None


async def opened(**pools: int) -> None:
    config = LLMConfig(listen="127.0.0.1:0", **{name: {"memory_size": size} for name, size in pools.items()})  # type: ignore[arg-type]
    async with LLMDataDist(LLMRole.MIX, 1, config):
        pass


async def test_a_pool_beyond_the_limit_is_refused_at_init_with_both_numbers(container: Container) -> None:
    container("0::/\n", {"memory.max": str(8 * MIB)})
    with pytest.raises(OutOfMemory, match=rf"{9 * MIB} bytes.*memory limit of this container, {8 * MIB} bytes"):
        await opened(mem_pool_cfg=9 * MIB)
    with pytest.raises(OutOfMemory, match=rf"host pool.*{10 * MIB} bytes.*{8 * MIB} bytes"):
        await opened(mem_pool_cfg=5 * MIB, host_mem_pool_cfg=5 * MIB)


async def test_a_pool_for_which_others_leave_no_room_is_told_at_init(
    container: Container, caplog: pytest.LogCaptureFixture
) -> None:
    container("0::/\n", {"memory.max": str(8 * MIB), "memory.stat": f"anon {4 * MIB}\nshmem 0"})
    with caplog.at_level(logging.WARNING, "aiodatadist"):
        await opened(mem_pool_cfg=3 * MIB)
        assert "memory limit" not in caplog.text
        await opened(mem_pool_cfg=5 * MIB)
    (told,) = [text for text in caplog.messages if "memory limit" in text]
    assert str(5 * MIB) in told
    assert str(4 * MIB) in told
    assert str(8 * MIB) in told


def test_what_a_limit_is() -> None:
    assert MemoryLimit(1, 0, "x").limit == 1
