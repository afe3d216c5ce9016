"""``aiodatadist demo``: a prefill and a decode process share a KV cache; or a prompt is read twice, with a context cache."""
