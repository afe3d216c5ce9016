"""Mooncake Store as a pool."""
