"""``aiodatadist chaos``: real processes that move stamped blocks, a seeded program of faults, and a check of every byte."""
