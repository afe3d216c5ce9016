"""Pools: the contract, how one is opened, and the implementations."""
