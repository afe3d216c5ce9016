"""Calls from where no event loop is: a forked child, and a thread of its own; and what they raise."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

Raised = tuple[type[BaseException], str] | None
"""What a call raised, and in which words; None if nothing."""


def in_child(calls: Sequence[Callable[[], Any]]) -> list[Raised]:
    """Return what each call raises in a forked child. Awaitable calls run until their first suspension."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, pickle.dumps([_raised_by(call) for call in calls]))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        data = answers.read()
    os.waitpid(child, 0)
    return list(pickle.loads(data))


async def in_thread(calls: Sequence[Callable[[], Any]]) -> list[Raised]:
    """Return what each call raises in a thread without an event loop, while the caller's goes on."""
    return await asyncio.to_thread(lambda: [_raised_by(call) for call in calls])


def _raised_by(call: Callable[[], Any]) -> Raised:
    try:
        made = call()
        if inspect.isawaitable(made):
            next(made.__await__(), None)
        elif inspect.isasyncgen(made):
            next(made.__anext__().__await__(), None)
    except BaseException as error:
        return type(error), str(error)
    return None
