"""The mutants match the code of today, so that a change of it does not silently leave one behind."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runner import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_replaces_stands_in_its_file_once(mutant: Mutant) -> None:
    assert mutant.mutated() != mutant.old


def test_no_two_mutants_have_the_same_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
