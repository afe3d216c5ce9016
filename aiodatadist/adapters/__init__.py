"""Adapters for serving engines: ``vllm``. ``block_service`` is what they have in common.

Refuses to be known: nothing else of the package imports this room, and an engine is imported by its own adapter alone.
"""
