"""SGLang's backend, behind :mod:`aiodatadist.adapters.sglang`."""
