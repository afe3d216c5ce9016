"""Jobs that run at the same time."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import pytest

from aiodatadist._concurrency.together import together


async def test_a_single_job_runs_in_its_callers_task_and_several_side_by_side() -> None:
    tasks: list[object] = []
    everyone = anyio.Event()

    async def job(jobs: int) -> None:
        tasks.append(asyncio.current_task())
        if len(tasks) == jobs:
            everyone.set()
        await everyone.wait()

    await together([partial(job, 1)])
    assert tasks == [asyncio.current_task()]
    tasks.clear()
    everyone = anyio.Event()
    await together([partial(job, 3)] * 3)
    assert len({*tasks, asyncio.current_task()}) == 4
    await together([])


async def test_what_a_single_job_raises_comes_as_it_is() -> None:
    async def job() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await together([job])
    with pytest.raises(ExceptionGroup) as group:
        await together([job, job])
    assert group.group_contains(ValueError, match="wrong")
