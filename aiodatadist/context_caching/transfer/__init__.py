"""How values move between the caller's memory and a pool."""
