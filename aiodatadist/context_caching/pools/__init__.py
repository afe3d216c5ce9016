"""Pools: the contract, how one is opened, and those that there are."""
