"""Adapters to existing distributed stores, each behind :class:`~aiodatadist.context_caching.pool.KVPool`."""
