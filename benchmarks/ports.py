"""Ports for servers that have to be told theirs, as ``aiodatadist.testing`` finds them."""

from aiodatadist.testing.ports import free_port, own_range

__all__ = ["free_port", "own_range"]
