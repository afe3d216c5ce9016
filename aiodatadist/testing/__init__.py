"""What our tests use, for yours: linked clusters in one process, and blocks whose contents say where they belong."""

from aiodatadist.testing.faults import soft_counters, soft_fault, soft_faults_cleared
from aiodatadist.testing.pairs import Cluster, cluster_info, linked_pair, open_cluster
from aiodatadist.testing.patterns import pattern, stamp, verify

__all__ = [
    "Cluster",
    "cluster_info",
    "linked_pair",
    "open_cluster",
    "pattern",
    "soft_counters",
    "soft_fault",
    "soft_faults_cleared",
    "stamp",
    "verify",
]
