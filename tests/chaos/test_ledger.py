"""A ledger finds every byte that is not where it has to be, and says whose it is."""

from __future__ import annotations

import pytest

from aiodatadist import Cache, CacheDesc, DataType
from aiodatadist.testing import BlockLedger, BlockStamp, MisplacedError

TENSORS, BLOCKS, BLOCK = 2, 4, 100


def ledger(owner: int = 7, generation: int = 3) -> tuple[BlockLedger, list[memoryview]]:
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK], DataType.DT_UINT8)
    views = [memoryview(bytearray(BLOCKS * BLOCK)) for _ in range(TENSORS)]
    return BlockLedger(Cache(1, desc, [0, 0], True), owner, generation, views), views


def filled(source: int, into: int, target: int, views: list[memoryview], version: int = 0) -> None:
    """Fill a block as a transfer from cluster ``source`` would, from its block ``target - 1``."""
    for tensor, view in enumerate(views):
        stamp = BlockStamp(source, into, tensor, target - 1, version)
        view[target * BLOCK : (target + 1) * BLOCK] = stamp.content(BLOCK)


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 99])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_anywhere_is_found(at: int, bit: int) -> None:
    books, views = ledger()
    books.write(range(BLOCKS))
    assert books.wrong() == []
    views[1][2 * BLOCK + at] ^= bit
    (words,) = books.wrong()
    assert words.startswith(
        "block 2 of tensor 1: expected cluster 7's block 2 of tensor 1, generation 3, version 0, but it holds"
    )
    assert books.wrong([0, 1, 3]) == []


def test_a_stamp_is_read_back_only_if_it_is_whole() -> None:
    stamp = BlockStamp(1, 2, 3, 4, 5)
    content = bytearray(stamp.content(100))
    assert BlockStamp.read(content) == stamp
    content[99] ^= 1
    assert BlockStamp.read(content) is None
    assert BlockStamp.read(stamp.content(100)[:31]) is None
    assert BlockStamp.read(bytes(100)) is None


def test_what_landed_is_expected_from_then_on() -> None:
    books, views = ledger()
    books.write([0])
    filled(9, 5, 2, views)
    (stamp,) = books.landed([2], 9, [1])
    assert (stamp.owner, stamp.generation, stamp.block) == (9, 5, 1)
    assert books.wrong() == []
    views[0][2 * BLOCK] ^= 1
    assert len(books.wrong()) == 1


def test_blocks_of_another_place_owner_or_version_are_misplaced() -> None:
    books, views = ledger()
    filled(9, 5, 2, views)
    with pytest.raises(MisplacedError, match=r"expected cluster 9's block 3 .* found cluster 9's block 1"):
        books.landed([2], 9, [3])
    with pytest.raises(MisplacedError, match="expected cluster 8's"):
        books.landed([2], 8, [1])
    views[1][2 * BLOCK : 3 * BLOCK] = BlockStamp(9, 5, 1, 1, 1).content(BLOCK)
    with pytest.raises(MisplacedError, match=r"block 2 of tensor 1: expected .* version 0, found .* version 1"):
        books.landed([2], 9, [1])


def test_a_torn_block_says_what_it_is_made_of() -> None:
    books, views = ledger()
    filled(9, 5, 2, views)
    views[0][2 * BLOCK + 64 : 3 * BLOCK] = BlockStamp(9, 6, 0, 1).content(BLOCK)[: BLOCK - 64]
    with pytest.raises(
        MisplacedError, match=r"generation 5, version 0 up to byte 64, .* generation 6, .* up to byte 96"
    ):
        books.landed([2], 9, [1])


def test_what_is_open_may_be_anything_and_what_is_settled_stays() -> None:
    books, views = ledger()
    books.write(range(BLOCKS))
    books.begin([1])
    views[0][BLOCK] ^= 1
    assert books.wrong() == []
    books.settle([1])
    assert books.wrong() == []
    views[0][BLOCK] ^= 1
    (words,) = books.wrong()
    assert words.startswith("block 1 of tensor 0: it was settled, and then changed")


def test_what_is_reclaimed_is_written_over_and_a_stray_byte_is_told_apart() -> None:
    books, views = ledger()
    books.write(range(BLOCKS))
    before = bytes(views[0])
    books.begin([1, 2])
    books.reclaim([1, 2])
    assert bytes(views[0][BLOCK : 2 * BLOCK]) != before[BLOCK : 2 * BLOCK]
    assert books.wrong() == books.strays() == []
    once = bytes(views[0])
    books.reclaim([1])
    assert bytes(views[0]) != once, "bytes of the last time are strays as well"
    views[0][BLOCK : 2 * BLOCK] = once[BLOCK : 2 * BLOCK]
    views[0][0] ^= 1
    (words,) = books.strays()
    assert words.startswith("block 1 of tensor 0: it was reclaimed, and then written into: expected")
    assert books.strays([0, 2, 3]) == []
    assert set(books.wrong()) > {words}
    assert len(books.wrong()) == 2
    books.begin([1])
    assert books.strays() == []
    for again in (books.write, books.settle):
        books.reclaim([2])
        again([2])
        views[1][2 * BLOCK] ^= 1
        assert books.strays() == [], "its caller wrote there, or a transfer may have"
        assert any(each.startswith("block 2 of tensor 1: ") for each in books.wrong())


def test_tensors_of_some_layers_alone() -> None:
    books, views = ledger()
    books.write(range(BLOCKS))
    books.begin([1], range(1, 2))
    views[1][BLOCK] ^= 1
    assert books.wrong() == []
    views[0][BLOCK] ^= 1
    assert len(books.wrong()) == 1
    books.settle_open()
    views[1][BLOCK] ^= 1
    assert len(books.wrong()) == 2
