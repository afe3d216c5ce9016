"""Serving engines over links and pools, behind :mod:`aiodatadist.adapters`."""
