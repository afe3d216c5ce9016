"""Redis and Valkey as a pool."""
