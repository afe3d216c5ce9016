"""Options of a cluster, and the rules of each."""
