"""Tests between machines: network namespaces of this one, with cables, routers, address translation and lost packets.

``networks.py`` makes the machines, ``carrier.py`` is a network that loses, delays and reorders, and ``programs.py`` runs
programs on machines.
"""
