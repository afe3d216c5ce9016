"""Disaggregated serving in three processes: a router, a prefill and a decode service. ``docs/serving.md`` explains each line.

::

    client  ->  router  ->  prefill    computes the prompt's KV cache, and keeps its blocks as a lease
                        ->  decode     pulls the blocks from prefill, and streams the tokens
"""
