"""One file per question. Each prints the machine, sizes and units, and the limit or the peer beside the result."""
