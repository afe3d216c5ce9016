"""``aiodatadist chaos``: real processes that move stamped blocks, a seeded program of faults, and a look at every byte."""
