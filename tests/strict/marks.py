"""Tests that do what the vendor's hardware does not."""

from __future__ import annotations

import os

import pytest

STRICT = os.environ.get("SOFTNPU_STRICT", "")

IS_HCCS = STRICT in {"hccs", "aicpu"}
"""The link kind is HCCS, of an A2 or of an A3."""

any_memory = pytest.mark.skipif(IS_HCCS, reason="HCCS: the test's tensors are numpy's, or do not start with a page")
told_of_failures = pytest.mark.skipif(STRICT == "roce", reason="RoCE: a request that fails wakes no stream")
interruptible = pytest.mark.skipif(STRICT != "", reason="HCCL: waiting for a peer cannot be interrupted")
