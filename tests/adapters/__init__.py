"""Tests of the parts that adapters for serving engines share, without an engine."""
