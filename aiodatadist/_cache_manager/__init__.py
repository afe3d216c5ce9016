"""The front door for caches and transfers: make caches, move bytes between them, release them."""

from aiodatadist._cache_manager.arguments import blocks_to_pull, blocks_to_push
from aiodatadist._cache_manager.block_pool import BlockPool, TakenBlocks
from aiodatadist._cache_manager.manager import CacheManager

__all__ = ["BlockPool", "CacheManager", "TakenBlocks", "blocks_to_pull", "blocks_to_push"]
