"""The v1 interface behind :mod:`aiodatadist.legacy`."""
