"""Jobs of one caller that run at the same time, and end before it continues."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio


async def together(jobs: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> None:
    """Run all jobs at the same time, and return once they have ended.

    A single job runs in the caller's own task. Thousands of callers may wait at a time, and each further task is some
    thirty objects that every garbage collection visits.

    Raises ExceptionGroup if a job of several fails, and what the job raises if there is only one.
    """
    if len(jobs) == 1:
        await jobs[0]()
        return
    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(job)
