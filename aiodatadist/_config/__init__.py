"""The options of a cluster, and the rules that each must keep."""
