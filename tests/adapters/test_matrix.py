"""Model families, parallelism, block sizes and layouts, pulled and pushed: what docs/serving-engines.md says of them."""

from __future__ import annotations

import pytest

from aiodatadist._adapters import push_in
from tests.adapters import matrix
from tests.adapters.matrix import CASES, HEADS_OF_COLUMNS, REFUSALS, Case, Refusal, carried_out, rows_of

WRITTEN = [rows_of("docs/serving-engines.md", number) for number in (0, 1)]


def test_the_pages_have_a_row_for_each_case() -> None:
    """``python -m tests.adapters.matrix --write`` writes both pages."""
    assert [row[:5] for row in WRITTEN[0]] == [case.words for case in CASES]
    assert WRITTEN[1] == [[each.what, each.words] for each in REFUSALS]
    for page in HEADS_OF_COLUMNS:
        assert [rows_of(page, number) for number in (0, 1)] == WRITTEN, page


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=[", ".join(case.words) for case in CASES])
def test_what_the_matrix_says_is_so(number: int, case: Case) -> None:
    assert WRITTEN[0][number][5:] == [*carried_out(case)]


def test_all_replicas_are_told_however_few_are_linked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_in, "REPLICAS_AT_A_TIME", 1)
    (case,) = [each for each in CASES if each.words[:4] == ["MLA (DeepSeek, Kimi)", "TP4", "TP1", "16"]]
    assert carried_out(case) == (matrix.MOVED, matrix.MOVED)


@pytest.mark.parametrize("refusal", REFUSALS, ids=[each.what for each in REFUSALS])
def test_what_cannot_be_moved_is_refused_when_the_engine_starts(refusal: Refusal) -> None:
    assert "model.layers.0" in refusal.words or "parallel_size" in refusal.words


def test_most_of_the_matrix_moves() -> None:
    pulled = [row[5] for row in WRITTEN[0]]
    assert pulled.count(matrix.MOVED) >= len(pulled) - 1
