"""Tests that the owner of two NPUs runs first: ``make hardware``. docs/npu.md says how.

HCCL's rules are kept: DEVICE memory from pools, two devices, a process for each, no ordinary memory of the host taken for
DEVICE memory. Contents are read back through the runtime, because the host cannot look at a device's memory.
"""
