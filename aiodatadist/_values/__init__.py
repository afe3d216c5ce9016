"""The values that callers pass: descriptors, keys, addresses of peers, grids. No memory, no I/O."""
