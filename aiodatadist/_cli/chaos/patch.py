"""Blocks that one task moves into."""

from __future__ import annotations

from aiodatadist import Cache
from aiodatadist._cli.chaos.sizes import PATCH
from aiodatadist.testing import BlockLedger


class Patch:
    """Every second block of a part of a cache. The blocks ``between`` must keep their stamps."""

    def __init__(self, cache: Cache, ledger: BlockLedger, first: int) -> None:
        self.cache, self.ledger = cache, ledger
        self.blocks = [first + 1 + 2 * i for i in range(PATCH)]
        self.between = [first + 2 * i for i in range(PATCH + 1)]
