"""What adapters for serving engines have in common, without an engine."""
