"""The caller's side: where its KV cache is, slot by slot."""
