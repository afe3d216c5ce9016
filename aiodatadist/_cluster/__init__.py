"""All peers of a cluster: its engine, its listener, its heartbeats, and its rank groups."""
