"""The calls that wait, behind :mod:`aiodatadist.blocking`."""
