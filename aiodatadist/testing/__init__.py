"""The tools of our tests, for yours.

Linked clusters in one process, blocks whose contents say where they belong, and faults of the device and of the
network.
"""

from aiodatadist._testing.faults import SoftHold, soft_counters, soft_fault, soft_faults_cleared, soft_hold
from aiodatadist._testing.ledger import BlockLedger, BlockStamp, MisplacedError
from aiodatadist._testing.pairs import Cluster, cluster_info, inside, linked_pair, open_cluster
from aiodatadist._testing.patterns import pattern, stamp, verify
from aiodatadist._testing.proxy import ChaosProxy
from aiodatadist._testing.toxics import (
    Bandwidth,
    Corrupt,
    Drop,
    Latency,
    LimitData,
    Reorder,
    Repeat,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
    Toxic,
)

__all__ = [
    "Bandwidth",
    "BlockLedger",
    "BlockStamp",
    "ChaosProxy",
    "Cluster",
    "Corrupt",
    "Drop",
    "Latency",
    "LimitData",
    "MisplacedError",
    "Reorder",
    "Repeat",
    "ResetPeer",
    "Slicer",
    "SlowClose",
    "SoftHold",
    "Timeout",
    "Toxic",
    "cluster_info",
    "inside",
    "linked_pair",
    "open_cluster",
    "pattern",
    "soft_counters",
    "soft_fault",
    "soft_faults_cleared",
    "soft_hold",
    "stamp",
    "verify",
]
