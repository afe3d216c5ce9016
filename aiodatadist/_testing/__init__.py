"""The tools of tests, behind :mod:`aiodatadist.testing`."""
