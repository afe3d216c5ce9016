"""HCCS or RoCE: HCCL's own rule, and softnpu's word."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from aiodatadist._device import Device
from aiodatadist._transport import Endpoint
from aiodatadist._transport.link_kind import LinkKind, link_kind, may_use_hccs, unfolds_by_itself, vendor_link_kind
from tests import children

A2, A3, OTHER = "Ascend910B3", "Ascend910_9392", "Ascend310P3"
NO_MORE = {"HCCL_INTRA_ROCE_ENABLE": "1"}


def end(server: str, pod: str = "") -> Endpoint:
    return Endpoint("hccl", "ascend", "host", server, "0", "10.0.0.1", 1, "7" if pod else "", pod)


@pytest.mark.parametrize(
    ("chip", "mine", "peer", "environment", "kind"),
    [
        (A2, end("a"), end("a"), {}, LinkKind.HCCS),
        (A2, end("a"), end("a"), {"HCCL_INTRA_ROCE_ENABLE": "0"}, LinkKind.HCCS),
        (A2, end("a"), end("a"), NO_MORE, LinkKind.ROCE),
        (A2, end("a"), end("b"), {}, LinkKind.ROCE),
        (A2, end("a", "p"), end("b", "p"), {}, LinkKind.ROCE),
        (A3, end("a", "p"), end("b", "p"), {}, LinkKind.HCCS),
        (A3, end("a", "p"), end("a", "q"), {}, LinkKind.ROCE),
        (A3, end("a"), end("b"), {}, LinkKind.HCCS),
        (A3, end("a", "p"), end("b", "p"), NO_MORE, LinkKind.ROCE),
        ("Ascend910B", end("a"), end("a"), {}, LinkKind.ROCE),  # the first generation has this name, too
        (OTHER, end("a"), end("a"), {}, LinkKind.ROCE),
        ("", end("a"), end("a"), {}, LinkKind.ROCE),
    ],
)
def test_the_vendors_rule(
    chip: str, mine: Endpoint, peer: Endpoint, environment: dict[str, str], kind: LinkKind
) -> None:
    assert vendor_link_kind(chip, mine, peer, environment) is kind
    assert vendor_link_kind(chip, peer, mine, environment) is kind


@pytest.mark.parametrize(
    ("chip", "mode", "expected"),
    [
        (A3, "", True),
        (A3, "AIV", True),
        (A3, "AI_CPU", True),
        (A3, "HOST", False),
        (A2, "", False),
        (A2, "AIV", False),
        (A2, "AI_CPU", True),
        (OTHER, "", False),
    ],
)
def test_which_chip_unfolds_batches_by_itself(chip: str, mode: str, expected: bool) -> None:
    assert unfolds_by_itself(chip, {"HCCL_OP_EXPANSION_MODE": mode} if mode else {}) is expected


async def _say() -> None:
    async with await Device.open(0) as device:
        runtime = device.runtime
        vendor = vendor_link_kind(runtime.chip, end("a"), end("a"), {})
        print(link_kind(runtime, end("a"), end("a")).name, vendor.name, may_use_hccs(runtime))


@pytest.mark.parametrize(
    ("strict", "said"),
    [
        ("", "FREE ROCE False"),
        ("hccs", "HCCS HCCS True"),
        ("roce", "ROCE ROCE False"),
        ("aicpu", "HCCS HCCS True"),
    ],
)
async def test_softnpu_says_what_it_is_and_has_a_chip_that_agrees(strict: str, said: str) -> None:
    process = await children.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        env={**os.environ, "SOFTNPU_STRICT": strict, "AIODATADIST_RUNTIME": "soft"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert (out.decode().strip(), process.returncode) == (said, 0)


if __name__ == "__main__":
    asyncio.run(_say())
