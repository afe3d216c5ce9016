"""HIXL's interface for code that does not await, behind :mod:`aiodatadist.blocking.hixl`."""
