"""KV blocks in a pool, behind :mod:`aiodatadist.context_caching`."""
