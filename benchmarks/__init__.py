"""Benchmarks, one file per question. Each prints the machine, sizes and units, and the limit or peer beside the result."""
