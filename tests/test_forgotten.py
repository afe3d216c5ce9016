"""Warnings when an event loop ends about what was opened and never closed, as of asyncio's own transports."""

from __future__ import annotations

import sys

import pytest

from tests import children

OPEN = {
    "cluster": """
from aiodatadist import LLMConfig, LLMDataDist, LLMRole

async def opened():
    datadist = LLMDataDist(LLMRole.MIX, 7, LLMConfig(listen="127.0.0.1:0"))
    await datadist.init()
    return datadist
""",
    "cache": """
from aiodatadist.context_caching import CcConfig_v1, ContextCache

async def opened():
    return await ContextCache.open(CcConfig_v1(rank_id=0, device_id=0, model_id="model"), "memory:")
""",
}
LEAVE = {
    "with_its_loop": """
with asyncio.Runner(loop_factory=new_loop) as runner:
    left = runner.run(opened())
""",
    "closed": """
async def main():
    left = await opened()
    await (left.finalize if hasattr(left, "finalize") else left.aclose)()
asyncio.Runner(loop_factory=new_loop).run(main())
gc.collect()
""",
}
WORDS = {"cluster": "cluster 7 was never finalized", "cache": "a ContextCache was never closed"}


@pytest.mark.parametrize("loop", ["asyncio.new_event_loop", "uvloop.new_event_loop"])
@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("what", OPEN)
def test_what_is_forgotten_warns_once(what: str, how: str, loop: str) -> None:
    program = f"import asyncio, gc, uvloop\nnew_loop = {loop}\n{OPEN[what]}\n{LEAVE[how]}"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = children.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WORDS[what]) == (0 if how == "closed" else 1), done.stderr
