"""The identity of a caller, and the names of its blocks."""
