"""What callers say: descriptors, keys, addresses of peers, grids. Values only: no memory, no I/O."""
