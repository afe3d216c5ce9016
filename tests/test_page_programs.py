"""Every Python program in README and docs/ runs as it stands there; fragments run where a test has set the scene.

A whole program begins with ``# NAME.py: what it does``. What it prints stands in the ``text`` block behind it. In front of
anything else stands a comment that a reader does not see: ``fragment: NAME``, which ``SCENES`` runs, or ``not run: REASON``.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodatadist
from aiodatadist import BlocksCacheKey, CacheDesc, DataType, blocking
from aiodatadist._testing.ports import free_port
from aiodatadist.testing import cluster_info, linked_pair, open_cluster, verify
from tests import children, pages
from tests.profiles import at_night

DESC = CacheDesc(4, [16, 4096], DataType.DT_UINT8)
RUN_ELSEWHERE = dict.fromkeys(
    ("prefill.py", "decode.py", "prompts.py", "hybrid.py", "worker.py"), "tests/test_readme.py"
)
RUN_ELSEWHERE |= dict.fromkeys(("metrics.py", "spans.py"), "tests/telemetry/test_page.py")
"""Programs whose test needs more than what they print, and the file where it is."""
NOT_RUN = {
    ("sglang.md", "needs SGLang, whose lane calls it: tests/engines/test_sglang.py"),
}

FOUND = [(page, block) for page in pages.ENGLISH for block in pages.blocks(page.read_text(encoding="utf-8"))]
PROGRAMS = [(page, block) for page, block in FOUND if block.kind == "python"]


def shown(title: str) -> str:
    """Return the output that the page shows for the program."""
    (number,) = (number for number, (_, block) in enumerate(FOUND) if block.title == title)
    page, block = FOUND[number + 1]
    assert (page, block.kind) == (FOUND[number][0], "text"), f"no output stands behind {title}"
    return block.text


def test_every_program_is_run_or_says_why_not() -> None:
    titles = [block.title for _, block in PROGRAMS if block.title]
    assert len(set(titles)) == len(titles) >= 8
    parts = [(page.name, *block.mark.partition(": ")[::2]) for page, block in PROGRAMS if not block.title]
    assert {(page, reason) for page, how, reason in parts if how == "not run"} == NOT_RUN
    assert {name for _, how, name in parts if how == "fragment"} == set(SCENES)
    assert {how for _, how, _ in parts} == {"fragment", "not run"}


UNPINNED = {"own_memory.py"}
"""Programs with HOST memory that is not pinned."""
WARNED = {"comes_back.py", "kept.py", "restarted.py", "rights.py", "two_machines.py", "under_chaos.py"}
"""Programs whose links break, or are refused, or carry plain bytes, which is a warning on stderr."""


@pytest.mark.parametrize("title", RUN_ELSEWHERE)
def test_a_program_that_is_run_elsewhere_is_named_there(title: str) -> None:
    assert title in [block.title for _, block in PROGRAMS]
    assert f'"{title}"' in (pages.ROOT / RUN_ELSEWHERE[title]).read_text(encoding="utf-8")


@pytest.mark.parametrize("title", sorted({block.title for _, block in PROGRAMS} - set(RUN_ELSEWHERE) - {""}))
@pytest.mark.parametrize("strict", ["", at_night("hccs"), at_night("roce")])
def test_program_prints_what_its_page_says(title: str, strict: str, tmp_path: Path) -> None:
    if strict and title in UNPINNED:
        pytest.skip("its page says that links may need pinned memory: the program's is numpy's")
    (page,) = (page for page, block in PROGRAMS if block.title == title)
    for block in (block for other, block in PROGRAMS if other == page and block.title):  # one may import another
        (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    command, environment = [sys.executable, "-W", "error", str(tmp_path / title)], dict(os.environ)
    environment.pop("SOFTNPU_STRICT", None)
    environment |= {"SOFTNPU_STRICT": strict} if strict else {}
    done = children.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50, forks=True)
    told = [
        line
        for line in done.stderr.splitlines()
        if title not in WARNED or not re.match(r"(link to )?cluster \d+\b", line)
    ]
    assert (told, done.returncode) == ([], 0)
    assert sorted(done.stdout.splitlines()) == sorted(shown(title).splitlines())


# ---- fragments ----

Scene = AbstractAsyncContextManager[dict[str, Any]]


@asynccontextmanager
async def pull() -> AsyncIterator[dict[str, Any]]:
    arrays = [np.zeros((16, 4096), np.uint8) for _ in range(DESC.num_tensors)]
    async with open_cluster(1, device_id=1) as prompt:
        await prompt.blocks(DESC)
        scene: dict[str, Any] = {"peer": cluster_info(prompt), "desc": DESC}
        scene["addrs"] = [array.ctypes.data for array in arrays]
        yield scene
        assert scene["report"].bytes == 2 * 4 * 4096
        assert all(array[:2].any() and not array[2:].any() for array in arrays)


@asynccontextmanager
async def landing() -> AsyncIterator[dict[str, Any]]:
    async with linked_pair(DESC) as (prompt, decoder, source, target):
        prefill, decode = prompt.datadist, decoder.datadist
        scene: dict[str, Any] = {"prefill": prefill, "decode": decode, "source": source, "target": target}
        yield scene
        assert scene["report"].bytes == 2 * 4 * 4096
        moved = [(tensor, place, 1, block) for tensor in range(4) for place, block in ((0, 3), (1, 9))]
        verify(decoder.memory(target), target, moved, owner=2)


@asynccontextmanager
async def submit() -> AsyncIterator[dict[str, Any]]:
    finished: list[object] = []
    async with open_cluster(1) as prompt:
        await prompt.blocks(DESC)
        worker = Worker(cluster_info(prompt))
        await asyncio.to_thread(worker.open)
        scene: dict[str, Any] = {
            "manager": worker.datadist.cache_manager, "cache": worker.cache, "src_blocks": [3, 9], "dst_blocks": [0, 1],
            "request": 7, "finished": lambda *of: finished.append(of),
        }  # fmt: skip
        scene["elsewhere"] = lambda: asyncio.to_thread(scene["handle"].wait, 30)
        yield scene
        assert finished == [(7, [])]
        await asyncio.to_thread(worker.datadist.finalize)


class Worker:
    """A worker whose blocking calls run in a thread."""

    def __init__(self, peer: aiodatadist.LLMClusterInfo) -> None:
        self.peer, self.datadist = peer, blocking.LLMDataDist(blocking.LLMRole.DECODER, 2)

    def open(self) -> None:
        config = blocking.LLMConfig()
        config.enable_cache_manager = config.enable_remote_cache_accessible = True
        config.device_id, config.mem_pool_cfg = 1, '{"memory_size": 1048576}'
        self.datadist.init(config.generate_options())
        self.datadist.link_clusters([self.peer], 5000)
        self.cache = self.datadist.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(2))


@asynccontextmanager
async def layers_out() -> AsyncIterator[dict[str, Any]]:
    async with linked_pair(DESC) as (prompt, decoder, source, target):
        scene: dict[str, Any] = {
            "manager": prompt.datadist.cache_manager, "cache": source, "num_layers": 2, "compute": asyncio.sleep,
            "src_block_indices": [3, 9], "dst_block_indices": [0, 1],
        }  # fmt: skip
        yield scene
        assert scene["report"].bytes == 2 * 4 * 4096
        moved = [(tensor, place, 1, block) for tensor in range(4) for place, block in ((0, 3), (1, 9))]
        verify(decoder.memory(target), target, moved, owner=2)


@asynccontextmanager
async def layers_in() -> AsyncIterator[dict[str, Any]]:
    async with linked_pair(DESC) as (prompt, decoder, source, target):

        async def ask_the_peer() -> None:
            synchronizer = aiodatadist.AwaitableLayerSynchronizer(2)
            configs = [aiodatadist.TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))]
            task = prompt.datadist.cache_manager.transfer_cache_async(source, synchronizer, configs, [3], [0])
            synchronizer.ready(0)  # and the second layer never
            scene["task"] = task

        scene: dict[str, Any] = {
            "manager": decoder.datadist.cache_manager,
            "cache": target,
            "elsewhere": ask_the_peer,
        }
        yield scene
        verify(decoder.memory(target), target, [(tensor, 0, 1, 3) for tensor in (0, 1)], owner=2)
        scene["task"].cancel()


@asynccontextmanager
async def imports() -> AsyncIterator[dict[str, Any]]:
    yield {}


@asynccontextmanager
async def observer() -> AsyncIterator[dict[str, Any]]:
    scene: dict[str, Any] = {}
    yield scene
    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = scene["Slow"]()
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])


@asynccontextmanager
async def link_errors() -> AsyncIterator[dict[str, Any]]:
    async with open_cluster(1, device_id=1) as prompt, open_cluster(2) as decoder:
        nowhere = aiodatadist.LLMClusterInfo(3)
        nowhere.append_remote_ip_info("127.0.0.1", free_port())
        scene: dict[str, Any] = {"datadist": decoder.datadist, "peers": [cluster_info(prompt), nowhere]}
        yield scene
        assert [error is None for error in scene["linked"].errors] == [True, False]


@asynccontextmanager
async def keep_linked() -> AsyncIterator[dict[str, Any]]:
    scene: dict[str, Any] = {"asyncio": asyncio, "random": random, "suppress": contextlib.suppress}
    yield scene
    address = ("127.0.0.1", free_port())
    async with open_cluster(2) as decoder, asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(scene["keep_linked"](decoder.datadist, 1, address))
        for _ in range(2):  # the second one is the first, stopped in order and started again
            async with open_cluster(1, device_id=1, listen_ip_info=f"127.0.0.1:{address[1]}"):
                await decoder.datadist.wait_linked(1)
                ended = tasks.create_task(decoder.datadist.wait_link_closed(1))
            assert "finalize" in await ended
        keeper.cancel()


@asynccontextmanager
async def until_stopped() -> AsyncIterator[dict[str, Any]]:
    scene: dict[str, Any] = {"asyncio": asyncio, "signal": signal}
    yield scene
    loop = asyncio.get_running_loop()
    async with open_cluster(1, device_id=1) as prompt, open_cluster(2) as decoder:
        await decoder.datadist.link_to(1, prompt.datadist.listen_address)
        waiting = loop.create_task(scene["until_stopped"]())
        loop.call_soon(lambda: loop.call_soon(signal.raise_signal, signal.SIGTERM))  # the handler is there by then
        try:
            await waiting
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
        ended = loop.create_task(decoder.datadist.wait_link_closed(1))
        await prompt.datadist.finalize()
        assert "finalize" in await ended


SCENES: dict[str, Callable[[], Scene]] = {
    "keep linked": keep_linked,
    "until stopped": until_stopped,
    "landing": landing,
    "pull": pull,
    "submit": submit,
    "layers out": layers_out,
    "layers in": layers_in,
    "import": imports,
    "observer": observer,
    "link errors": link_errors,
}
"""What has to be there for a fragment, and what holds behind it. ``elsewhere`` is awaited where the page says ``...``."""


class Elsewhere(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_left_out = isinstance(node.value, ast.Constant) and node.value.value is ...
        return ast.copy_location(ast.parse("await elsewhere()").body[0], node) if is_left_out else node


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.name}: {block.mark}")
        for page, block in PROGRAMS
        if block.mark.startswith("fragment: ")
    ],
)
async def test_fragment_runs_in_its_scene(page: Path, block: pages.Block) -> None:
    tree = ast.parse(block.text.replace(", ...", ""))  # and other names
    tree = ast.fix_missing_locations(Elsewhere().visit(tree))
    code = compile(tree, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    async with SCENES[block.mark.removeprefix("fragment: ")]() as scene:
        scene.update({name: getattr(aiodatadist, name) for name in aiodatadist.__all__})
        running = eval(code, scene)
        if running is not None:
            await running


# ---- what a reader does with a program next ----


class KilledPrefill:
    def __init__(self) -> None:
        self.asked: asyncio.Event = asyncio.Event()

    async def compute(self, _lease: str, _tokens: list[int]) -> object:
        self.asked.set()
        return await asyncio.get_running_loop().create_future()

    async def take_back(self, _lease: str) -> None:
        raise ConnectionRefusedError


async def test_a_client_of_the_tutorial_can_leave_when_prefill_was_killed() -> None:
    (text,) = (block.text for _, block in PROGRAMS if block.title == "service.py")
    service: dict[str, Any] = {"__name__": "service"}
    exec(compile(text, "service.py", "exec"), service)
    async with linked_pair(DESC) as (_, decoder, _, target):
        prefill = KilledPrefill()
        client = asyncio.create_task(service["Decode"](decoder.datadist, target, prefill).generate([1]))
        await prefill.asked.wait()
        client.cancel()
        await asyncio.wait([client])
        assert client.cancelled()
