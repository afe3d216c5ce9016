"""They mean something: caches and their keys, who uses them, and what a transfer of theirs moves.

``table`` holds this cluster's caches, ``catalogue`` what a peer offers, ``plan`` turns "these blocks of that cache" into a
grid of byte ranges, ``task`` is the future that callers see. Promises: a cache in use is not given up, and a plan leaves
neither end's memory. Refuses to know: sockets and devices.
"""
