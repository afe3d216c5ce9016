"""Incidents: each is counted, and one line a second is logged of each kind."""

from __future__ import annotations

import logging

import pytest

from aiodatadist._counting import Incident, Incidents

logger = logging.getLogger("aiodatadist.tests.incidents")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_line_a_second_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    incidents = Incidents(clock)
    for number in range(10):
        incidents.add(Incident.PULL_FAILED, logger, "refused %d", number)
    clock.now += 0.999
    incidents.add(Incident.PULL_FAILED, logger, "refused %d", 10)
    clock.now += 0.001
    incidents.add(Incident.PULL_FAILED, logger, "refused %d", 11)
    clock.now += 5
    incidents.add(Incident.PULL_FAILED, logger, "refused %d", 12)
    assert caplog.messages == ["refused 0", "refused 11 (and 10 more)", "refused 12"]
    assert incidents.counts == {"pull_failed": 13}


def test_each_kind_has_its_own_line_and_level(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents(Clock())
    with caplog.at_level(logging.INFO):
        for kind in Incident:
            for number in range(3):
                incidents.add(kind, logger, "%s %d", kind, number, level=logging.INFO)
    assert caplog.messages == [f"{kind} 0" for kind in Incident]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert incidents.counts == {kind.value: 3 for kind in Incident}


def test_a_line_is_of_the_code_that_caused_it_and_may_have_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents(Clock())
    try:
        raise ValueError("not foreseen")
    except ValueError:
        incidents.add(Incident.DEFECT, logger, "it failed", exc_info=True)
    (record,) = caplog.records
    assert record.filename == "test_incidents.py"
    assert "ValueError: not foreseen" in caplog.text


def test_what_is_taken_is_what_was_counted_since_and_stays_counted() -> None:
    incidents = Incidents(Clock())
    for _ in range(3):
        incidents.add(Incident.LINK_ENDED, logger, "ended")
    assert incidents.take() == {"link_ended": 3}
    assert incidents.take() == {}
    incidents.add(Incident.LINK_ENDED, logger, "ended")
    incidents.add(Incident.LINK_MADE, logger, "made")
    assert incidents.take() == {"link_ended": 1, "link_made": 1}
    assert incidents.counts == {"link_ended": 4, "link_made": 1}
