"""A table of ranges of memory, compared with a list that is looked through."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._values.spans import Spans

places = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=12)


def apart(ranges: list[tuple[int, int]]) -> dict[int, int]:
    """Return those of the ranges that overlap no earlier one: address and bytes."""
    kept: dict[int, int] = {}
    for start, nbytes in ranges:
        if all(start + nbytes <= other or other + size <= start for other, size in kept.items()):
            kept[start] = nbytes
    return kept


@given(places, places, st.data())
def test_a_table_finds_what_a_list_finds(
    ranges: list[tuple[int, int]], asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    kept = apart(ranges)
    spans: Spans[int] = Spans()
    for start, nbytes in kept.items():
        spans.add(start, nbytes, start)
    for start in data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else ():
        spans.remove(start)
        del kept[start]
    spans.remove(1000)
    assert len(spans) == len(kept)
    assert list(spans) == sorted(kept)
    for start, nbytes in asked:
        around = [s for s, n in kept.items() if s <= start and start + nbytes <= s + n]
        assert spans.around(start, nbytes) == (around[0] if around else None)
        overlapped = sorted(s for s, n in kept.items() if s < start + nbytes and start < s + n)
        assert spans.overlapped(start, nbytes) == (overlapped[0] if overlapped else None)
    if asked:
        found, missing = spans.covering(array("Q", [a for a, _ in asked]), array("Q", [n for _, n in asked]))
        assert missing == [i for i, (a, n) in enumerate(asked) if spans.around(a, n) is None]
        assert set(found) == {spans.around(a, n) for a, n in asked} - {None}
