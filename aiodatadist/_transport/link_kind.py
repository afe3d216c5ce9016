"""The kind of link between two devices: HCCS, the cards' own interconnect, or RoCE, their network cards.

HCCL decides that when a communicator is prepared, from the chip, the rank table and the environment, and tells no
caller. The two kinds differ in what they can reach and in what a cancelled transfer leaves behind, so HCCL's rule is
repeated here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from aiodatadist._native.library import ring
from aiodatadist.errors import FeatureNotEnabled

if TYPE_CHECKING:
    from aiodatadist._native.runtime import Runtime
    from aiodatadist._transport.contract import Endpoint

A2 = re.compile(r"Ascend910B\d")
A3 = re.compile(r"Ascend910_93")

INTRA_ROCE = "HCCL_INTRA_ROCE_ENABLE"
EXPANSION_MODE = "HCCL_OP_EXPANSION_MODE"


class LinkKind(Enum):
    """The kinds of links. ``FREE`` is softnpu that is not strict: whatever makes sense is possible."""

    FREE = "free"
    HCCS = "HCCS"
    ROCE = "RoCE"


SOFT_KINDS = (LinkKind.FREE, LinkKind.HCCS, LinkKind.ROCE, LinkKind.HCCS)
"""The kinds, indexed by what ``softnpu_strictness`` returns."""


def link_kind(runtime: Runtime, mine: Endpoint, peer: Endpoint) -> LinkKind:
    """Return the kind of a link between two devices, of which the first is this process's."""
    if runtime.is_soft:
        return SOFT_KINDS[runtime.soft_strictness]
    return vendor_link_kind(runtime.chip, mine, peer, os.environ)


def may_use_hccs(runtime: Runtime) -> bool:
    """Return True if some peer can be linked over HCCS.

    The demands of HCCS on memory are checked when it is registered, before there are peers.
    """
    if runtime.is_soft:
        return SOFT_KINDS[runtime.soft_strictness] is LinkKind.HCCS
    return bool(A2.match(runtime.chip) or A3.match(runtime.chip)) and not _prefers_roce(os.environ)


def is_unfolded(runtime: Runtime, kind: LinkKind) -> bool:
    """Return True if HCCL unfolds the batches of such a link on the device, although each communicator asks for the host.

    Then HCCL copies on its own stream, aborting our stream stops no copy, and one notify per communicator reports all
    ends. Such transfers need RoCE's rules over HCCS, too. HCCL does not report whether it followed the request, but it
    names the fields of the configuration that it reads.
    """
    return kind is LinkKind.HCCS and unfolds_by_itself(runtime.chip, os.environ) and not _reads_expansion_mode(runtime)


def _reads_expansion_mode(runtime: Runtime) -> bool:
    try:
        return int(runtime.hccl.HcclGetCommConfigCapability()) > int(ring.HCCL_COMM_CONFIG_OP_EXPANSION_MODE)
    except FeatureNotEnabled:
        return False


def unfolds_by_itself(chip: str, environment: Mapping[str, str]) -> bool:
    """Return True if HCCL unfolds batches on the device unless a communicator's configuration decides otherwise.

    On an A3 only HOST keeps it on the host. AIV, which guides for serving engines set, does not. On an A2 only AI_CPU moves
    it to the device.
    """
    mode = environment.get(EXPANSION_MODE, "")
    return mode != "HOST" if A3.match(chip) else mode == "AI_CPU"


def vendor_link_kind(chip: str, mine: Endpoint, peer: Endpoint, environment: Mapping[str, str]) -> LinkKind:
    """Return the kind of a link by HCCL's rule. ``chip`` is the name that ``aclrtGetSocName`` returns.

    A2 has HCCS within a server, A3 within a super pod; two devices that name no pod count as one pod. Other chips have
    none, and HCCL_INTRA_ROCE_ENABLE=1 switches it off.
    """
    if _prefers_roce(environment):
        return LinkKind.ROCE
    if A2.match(chip):
        return LinkKind.HCCS if mine.server_id == peer.server_id else LinkKind.ROCE
    if A3.match(chip):
        return LinkKind.HCCS if mine.super_pod_id == peer.super_pod_id else LinkKind.ROCE
    return LinkKind.ROCE


def _prefers_roce(environment: Mapping[str, str]) -> bool:
    return environment.get(INTRA_ROCE, "") not in {"", "0"}
