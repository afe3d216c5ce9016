"""With real serving engines: ``make vllm``. They have an environment of their own, and other lanes leave this folder out."""
