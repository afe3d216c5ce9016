"""Adapters for serving engines: ``vllm``, ``sglang`` and ``lmcache``. ``block_service`` is their common part.

Nothing else of the package imports this room, and an engine is imported only by its own adapter.
"""
