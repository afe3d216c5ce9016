"""All peers: the engine of a cluster, its listener, its heartbeats, and its rank groups."""
