"""Programs that obey orders: a line of JSON each, answered with a line.

An order is ``[METHOD, ARGUMENTS]`` for a public method. The answer is ``{"value": ...}``, or
``{"error": CLASS, "text": WORDS}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

MOST_BYTES = 1 << 20
"""The longest order."""


async def serve(obeys: object, first: object) -> None:
    """Answer with a first value, then carry out the orders on standard input, until that ends."""
    orders = asyncio.StreamReader(limit=MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    _say({"value": first})
    while line := await orders.readline():
        _say(await _obey(obeys, json.loads(line)))


async def _obey(obeys: object, words: list[Any]) -> dict[str, Any]:
    order, arguments = words
    assert not order.startswith("_")
    try:
        return {"value": await getattr(obeys, order)(**arguments)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
