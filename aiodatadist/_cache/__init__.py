"""Caches: their keys, their users, and the bytes that their transfers move.

``table`` holds this cluster's caches, ``registry`` makes and releases them, and ``catalogue`` has those that a peer offers.
``plan`` turns "these blocks of that cache" into a grid of byte ranges, and ``task`` is the future that callers see. The room
promises that a cache in use is not released, and that a plan leaves neither end's memory. It knows nothing of sockets.
"""
