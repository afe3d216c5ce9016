"""Memory that is registered with the transport over TCP: ranges are equal or apart, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodatadist import ParamInvalid
from aiodatadist._transport import Region
from aiodatadist._transport.tcp import TcpTransport
from aiodatadist._values.descriptors import Placement

BYTES = 4096


class Owner:
    """A device that notes which memory it has adopted."""

    runtime, index = SimpleNamespace(name="soft", is_soft=True), 0

    def __init__(self) -> None:
        self.memory: set[int] = set()

    def adopt(self, ranges: list[tuple[int, int, Placement]]) -> None:
        self.memory.update(address for address, *_ in ranges)

    def disown(self, ranges: list[tuple[int, int]]) -> None:
        self.memory.difference_update(address for address, _ in ranges)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def transport(owner: Owner) -> TcpTransport:
    return TcpTransport(cast(Any, owner))


def region(number: int, nbytes: int = BYTES, offset: int = 0) -> Region:
    return Region((number + 1) * BYTES + offset, nbytes, Placement.HOST)


async def test_a_region_is_compared_with_its_neighbours_only(
    transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may have thousands, and its event loop waits for the check."""
    compared = 0
    overlaps = Region.overlaps

    def counted(one: Region, other: Region) -> bool:
        nonlocal compared
        compared += 1
        return overlaps(one, other)

    await transport.register([region(number) for number in range(0, 2000, 2)])
    monkeypatch.setattr(Region, "overlaps", counted)
    await transport.register([region(number) for number in range(1, 201, 2)])
    assert compared <= 200


@pytest.mark.parametrize("number", [10, 11, 12])
@pytest.mark.parametrize("way", ["registered before", "registered together"])
async def test_what_overlaps_any_other_is_refused_and_changes_nothing(
    way: str, number: int, transport: TcpTransport, owner: Owner
) -> None:
    known = [region(each) for each in (12, 10, 11)]
    wrong = [region(20), region(number, offset=BYTES // 2)]
    await transport.register(known if way == "registered before" else [])
    before = set(owner.memory)
    with pytest.raises(ParamInvalid, match=r"overlaps the registered .*: ranges must be equal or apart"):
        await transport.register(wrong if way == "registered before" else known + wrong)
    assert owner.memory == before
    await transport.register([region(20, 64), region(20, 64), *known])
    await transport.unregister([region(20, 64)])
    assert len(owner.memory) == 4
    await transport.unregister([region(20, 64), *known])
    await transport.unregister([] if way == "registered together" else known)
    assert owner.memory == set()
    await transport.register(wrong)
