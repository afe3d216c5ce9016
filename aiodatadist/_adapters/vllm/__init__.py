"""The two vLLM connectors, behind :mod:`aiodatadist.adapters.vllm`."""
