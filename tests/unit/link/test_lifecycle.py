"""The life of a link: every event meets every value, and nothing else changes a link's state."""

from __future__ import annotations

import ast

import pytest

from aiodatadist._link.lifecycle import (
    LINK_CAUSES,
    TABLE,
    Aspect,
    Cause,
    End,
    Event,
    Lifecycle,
    LinkState,
    Ownership,
    Reach,
    Sequel,
    Service,
)
from aiodatadist.errors import InternalError, LinkClosed, LinkError, PeerLost, ProtocolError
from tests.rooms import ONE_WORKER, modules, nodes_of

TOGETHER = ONE_WORKER

ASPECTS: dict[str, type[Reach | End | Service | Ownership | Sequel]] = {
    "reach": Reach,
    "end": End,
    "service": Service,
    "ownership": Ownership,
    "sequel": Sequel,
}
PAIRS = [(value, event) for event in Event for value in ASPECTS[event.aspect]]
WHY = LinkError("it is over")


def life_at(aspect: str, value: Aspect) -> Lifecycle:
    """Return the life of a link that has come to a value by events, the fewest that lead there."""
    paths: list[tuple[Event, ...]] = [()]
    for path in paths:  # breadth first
        life = lived(path)
        if getattr(life, aspect) is value:
            return life
        paths += [(*path, event) for event in TABLE[getattr(life, aspect)] if event not in path]
    raise AssertionError(f"no events lead to {value}")


def lived(events: tuple[Event, ...]) -> Lifecycle:
    life = Lifecycle()
    for event in events:
        life.on(event, WHY)
    return life


def values_of(life: Lifecycle) -> dict[str, Aspect]:
    return {aspect: getattr(life, aspect) for aspect in ASPECTS}


@pytest.mark.parametrize(("value", "event"), PAIRS, ids=lambda each: f"{type(each).__name__}.{each.name}")
def test_an_event_changes_its_own_aspect_as_the_table_says_or_is_a_defect(value: Aspect, event: Event) -> None:
    life = life_at(event.aspect, value)
    before, failure = values_of(life), life.failure
    after = TABLE[value].get(event)
    if after is None:
        with pytest.raises(InternalError, match=rf"{event.word}.*{event.aspect} is {value.name}"):
            life.on(event, WHY)
        assert (values_of(life), life.failure) == (before, failure)
        return
    ends = life.on(event, PeerLost("another reason"))
    assert values_of(life) == {**before, event.aspect: after}
    assert ends == (value is End.RUNNING)
    assert (life.failure is not failure) == ends, "the first reason stays"


def test_the_table_has_each_value_and_leads_nowhere_else() -> None:
    assert set(TABLE) == {value for aspect in ASPECTS.values() for value in aspect}
    for value, row in TABLE.items():
        assert all(ASPECTS[event.aspect] is type(value) is type(after) for event, after in row.items())


def test_a_link_that_has_ended_is_never_ready_again() -> None:
    order = [LinkState.OPENING, LinkState.READY, LinkState.CLOSING, LinkState.CLOSED, LinkState.BROKEN]
    for value in End:
        for event, after in TABLE[value].items():
            assert isinstance(after, End)
            is_unfiled = (value, event) == (End.BROKEN, Event.CLOSE)
            assert order.index(after.state) >= order.index(value.state) or is_unfiled
            assert after is not End.RUNNING


def test_an_end_needs_a_reason_and_keeps_the_first_one() -> None:
    life = lived((Event.AGREE, Event.FILE))
    with pytest.raises(InternalError):
        life.on(Event.BREAK)
    assert (life.state, life.failure) == (LinkState.READY, None)
    first = PeerLost("its heartbeats stopped")
    assert life.on(Event.BREAK, first, Cause.HEARTBEATS_MISSED)
    assert not life.on(Event.GIVE_BACK, LinkClosed("it was closed"))
    assert (life.failure, life.cause) == (first, Cause.HEARTBEATS_MISSED)


@pytest.mark.parametrize(
    ("failure", "cause", "word"),
    [
        (LinkClosed(""), None, "unlinked"),
        (LinkClosed(""), Cause.REFUSED, "unlinked"),
        (PeerLost(""), None, "connection_lost"),
        (PeerLost(""), Cause.DEVICE_ERROR, "device_error"),
        (ProtocolError(""), None, "protocol_error"),
        (LinkError(""), None, "other"),
    ],
)
def test_the_cause_follows_from_the_failure_unless_more_is_known(
    failure: LinkError, cause: Cause | None, word: str
) -> None:
    life = lived((Event.AGREE,))
    life.on(Event.LAST_WORD, failure, cause)
    assert life.cause is not None
    assert life.cause.word == word
    assert life.was_unlinked == (word == "unlinked" and cause is None)
    assert word in LINK_CAUSES


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), LinkState.OPENING),
        ((Event.AGREE,), LinkState.READY),
        ((Event.CLOSE,), LinkState.CLOSED),
        ((Event.AGREE, Event.BREAK, Event.FILE), LinkState.BROKEN),
        ((Event.AGREE, Event.BREAK, Event.CLOSE), LinkState.CLOSED),
        ((Event.AGREE, Event.FILE, Event.MEET), LinkState.READY),
        ((Event.AGREE, Event.FILE, Event.UNLINK), LinkState.CLOSING),
    ],
)
def test_callers_see_one_of_five_states(events: tuple[Event, ...], state: LinkState) -> None:
    life = lived(events)
    assert life.state is state
    assert life.is_filed == (Event.FILE in events)
    assert life.is_usable == (life.is_mutual and state is LinkState.READY)
    assert life.is_open == (state in {LinkState.READY, LinkState.CLOSING})


@pytest.mark.parametrize(
    ("events", "is_unanswered"),
    [
        ((Event.UNLINK, Event.GIVE_BACK), False),
        ((Event.UNLINK, Event.LAST_WORD, Event.FALL_SILENT, Event.GIVE_BACK), False),
        ((Event.UNLINK, Event.FALL_SILENT, Event.GIVE_BACK), True),
        ((Event.UNLINK, Event.FALL_SILENT, Event.BREAK, Event.GIVE_BACK), True),
        ((Event.UNLINK, Event.BREAK, Event.GIVE_BACK), True),
        ((Event.UNLINK, Event.BREAK, Event.LAST_WORD, Event.GIVE_BACK), False),
        ((Event.LAST_WORD, Event.BREAK, Event.GIVE_BACK), False),
        ((Event.BREAK, Event.GIVE_BACK), False),
    ],
)
def test_a_peer_that_leaves_without_an_answer_is_told_apart(events: tuple[Event, ...], is_unanswered: bool) -> None:
    assert lived((Event.AGREE, Event.FILE, *events)).is_unanswered == is_unanswered


def test_only_a_link_that_broke_is_made_again() -> None:
    for failure, is_retryable in ((PeerLost("gone"), True), (LinkClosed("unlinked"), False)):
        life = lived((Event.AGREE, Event.WANT))
        assert not life.is_retryable, "it has not ended"
        life.on(Event.BREAK, failure)
        assert life.is_retryable == is_retryable
        life.on(Event.STOP_WANTING)
        assert not life.is_retryable


# ---- nothing else sets a link's state ----


def is_of_a_life(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Attribute) and node.value.attr == "life" and node.attr in Lifecycle.__slots__


def test_only_the_lifecycle_sets_its_attributes() -> None:
    wrong = [
        f"{module}:{node.lineno} sets {ast.unparse(node)}"
        for module in modules()
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and is_of_a_life(node)
    ]
    assert not wrong


@pytest.mark.parametrize("part", ["link", "session", "ownership", "reactions"])
def test_no_boolean_stands_beside_the_state_of_a_link(part: str) -> None:
    """A second flag beside the tables means that one of them lacks a state."""
    flags = [
        ast.unparse(node)
        for node in nodes_of(f"aiodatadist._link.{part}")
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, bool)
        and "self." in ast.unparse(node)
    ]
    assert not flags
