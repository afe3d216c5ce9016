"""LMCache's two interfaces, behind :mod:`aiodatadist.adapters.lmcache`."""
