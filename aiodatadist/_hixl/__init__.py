"""HIXL's interface behind :mod:`aiodatadist.hixl`: byte ranges by address, over the links of a cluster."""
