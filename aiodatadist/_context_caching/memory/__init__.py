"""The caller's side: the places of its KV cache, slot by slot."""
