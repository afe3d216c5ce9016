"""Figures that upstream publishes: GB/s between two devices of one server, one block per request.

From benchmarks/performance.md of the hixl repository, which holds LLM-DataDist, as of August 2026. ``push`` is its column
D2rD, ``pull`` its column rD2D. It publishes no latency.
"""

from __future__ import annotations

import re

SIZES = [size << 10 for size in (16, 32, 64, 128, 256, 512, 1024, 2048)]
"""Bytes of a block."""

A2 = {
    ("push", "HCCS"): [1.499, 3.041, 6.088, 12.149, 18.048, 18.715, 19.064, 19.234],
    ("push", "RoCE"): [0.657, 1.339, 2.596, 5.343, 11.038, 22.474, 18.278, 22.608],
    ("pull", "HCCS"): [1.563, 3.174, 6.334, 12.635, 23.629, 24.66, 25.202, 25.521],
    ("pull", "RoCE"): [0.653, 1.267, 2.592, 5.315, 10.672, 12.86, 22.093, 22.579],
}
A3 = {
    ("push", "HCCS"): [6.916, 16.05, 28.882, 45.637, 66.667, 81.967, 84.175, 93.075],
    ("push", "RoCE"): [7.114, 5.7, 10.126, 16.393, 21.548, 21.842, 21.397, 21.533],
    ("pull", "HCCS"): [7.075, 17.332, 30.555, 49.554, 74.272, 94.985, 95.129, 107.388],
    ("pull", "RoCE"): [6.665, 5.609, 9.971, 15.206, 21.338, 21.701, 21.327, 21.364],
}


def published(chip: str, what: str, link: str, nbytes: int) -> float | None:
    """Return upstream's GB/s, or None if it has no figure for the chip that ``aclrtGetSocName`` names."""
    table = A2 if re.match(r"Ascend910B\d", chip) else A3 if chip.startswith("Ascend910_93") else None
    return None if table is None else table[what, link][SIZES.index(nbytes)]
