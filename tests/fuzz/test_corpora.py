"""Inputs that fuzzers found, and examples: each reader reads all of it, and some small changes of it."""

from __future__ import annotations

import pytest

from tests.fuzz.corpora import kept
from tests.fuzz.mutate import mutated
from tests.fuzz.native import PROGRAMS
from tests.fuzz.readers import CORPUS, READERS

CHANGES = 150
"""Changed inputs of each reader."""


@pytest.mark.parametrize("name", READERS)
def test_a_reader_accepts_its_examples(name: str) -> None:
    for data in READERS[name].examples():
        READERS[name].read(data)


@pytest.mark.parametrize("name", READERS)
def test_what_was_found_once_is_read_or_refused(name: str) -> None:
    for data in kept(name):
        READERS[name].check(data)


@pytest.mark.parametrize("name", READERS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    for data in mutated(kept(name), seed=1, count=CHANGES):
        READERS[name].check(data)


def test_corpora_are_of_readers() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == {*READERS, *PROGRAMS}
