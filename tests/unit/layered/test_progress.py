"""The progress of a destination: every event meets every state that events lead to, and nothing else changes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from aiodatadist._device import TransferState
from aiodatadist._layered.progress import END, MAX_IN_FLIGHT, TABLE, Event, Progress, Stage
from aiodatadist.errors import InternalError
from tests.rooms import ONE_WORKER, imports_of, modules, nodes_of, tree_of

TOGETHER = ONE_WORKER

PROGRESS = "aiodatadist._layered.progress"
LAYERS = range(3, 5)
COUNTS = ("offered", "ready", "sent", "landed", "told")
OPEN = (Stage.LINKING, Stage.FINDING, Stage.SENDING)
Step = tuple[Event, int]
State = tuple[Stage, tuple[int, ...]]
Walk = tuple[State, Progress, Step]

STEPS = [(event, count) for event in Event for count in (range(len(LAYERS) + 2) if event.count else (0,))]
"""Every event, with every number of layers that it could speak of, and one that is too large."""


def lived(steps: tuple[Step, ...]) -> Progress:
    progress = Progress(LAYERS, is_linked=False)
    for event, count in steps:
        progress.on(event, count)
    return progress


def state_of(progress: Progress) -> State:
    return progress.stage, tuple(getattr(progress, count) for count in COUNTS)


def reachable() -> dict[State, tuple[Step, ...]]:
    """Return every state that events lead to, with the fewest events that lead there."""
    found: dict[State, tuple[Step, ...]] = {state_of(lived(())): ()}
    paths: list[tuple[Step, ...]] = [()]
    for path in paths:  # breadth first
        for step in STEPS:
            progress = lived(path)
            try:
                progress.on(*step)
            except InternalError:
                continue
            if found.setdefault(state_of(progress), (*path, step)) == (*path, step):
                paths.append((*path, step))
    return found


REACHABLE = reachable()


def walks(stages: Sequence[Stage] = tuple(Stage), events: Sequence[Event] = tuple(Event)) -> Iterator[Walk]:
    """Yield each reachable state with each step: the state, a progress that has come there, the step."""
    for state, path in REACHABLE.items():
        if state[0] in stages:
            for step in STEPS:
                if step[0] in events:
                    yield state, lived(path), step


# ---- every event in every state ----


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_events_lead_to_every_stage(stage: Stage) -> None:
    assert any(found is stage for found, _ in REACHABLE)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_an_event_changes_what_the_table_says_or_is_a_defect(stage: Stage, event: Event) -> None:
    seen = 0
    for before, progress, (_, count) in walks([stage], [event]):
        seen += 1
        at = dict(zip(COUNTS, before[1], strict=True)) | {"total": len(LAYERS)}
        is_early = event is Event.FINISH and at["landed"] < at["total"]
        is_too_much = bool(event.count) and count > at[event.most]
        after = TABLE[stage].get(event, event)
        if after is event or (after is not None and (is_early or is_too_much)):
            with pytest.raises(InternalError, match=rf"{event.word}.*that is {stage.word}"):
                progress.on(event, count)
            assert state_of(progress) == before
        elif after is None:
            assert not progress.on(event, count)
            assert state_of(progress) == before
        else:
            expected = {**at, event.count: max(count, at[event.count])} if event.count else at
            has_changed = progress.on(event, count)
            assert state_of(progress) == (after, tuple(expected[name] for name in COUNTS))
            assert has_changed == (state_of(progress) != before or not event.count)
    assert seen


def test_the_table_has_every_stage_and_leads_forward_only() -> None:
    assert set(TABLE) == set(Stage)
    order = list(Stage)
    for stage, row in TABLE.items():
        for event, after in row.items():
            assert after is None or order.index(after) >= order.index(stage)
            assert not event.count or after in {stage, None}, "an event that counts layers moves no stage"


# ---- promises, in every state ----


def test_no_layer_is_told_before_it_landed_or_lands_before_it_was_sent() -> None:
    for _, (offered, ready, sent, landed, told) in REACHABLE:
        assert told <= landed <= sent <= len(LAYERS)
        assert max(offered, ready) <= len(LAYERS)


def test_counts_only_grow() -> None:
    for before, progress, step in walks():
        try:
            progress.on(*step)
        except InternalError:
            continue
        assert all(b >= a for a, b in zip(before[1], state_of(progress)[1], strict=True))


def test_a_destination_that_has_ended_stays_so_and_nothing_leaves_or_lands() -> None:
    ended = [stage for stage in Stage if stage not in OPEN]
    for (stage, (offered, _, sent, landed, _)), progress, step in walks(ended):
        try:
            progress.on(*step)
        except InternalError:
            assert step[0] in {Event.READY, Event.TELL}, "layers that there are not, or that have not landed"
        assert (progress.stage, progress.offered, progress.sent, progress.landed) == (stage, offered, sent, landed)
        assert not progress.is_open
        assert not progress.may_send(1, 0)


def test_it_succeeds_only_with_all_layers() -> None:
    assert {counts[3] for stage, counts in REACHABLE if stage is Stage.DONE} == {len(LAYERS)}


def test_nothing_is_counted_before_the_destination_is_found() -> None:
    assert {counts for stage, counts in REACHABLE if stage in OPEN[:2]} == {(0, 0, 0, 0, 0)}


def test_every_end_has_its_event() -> None:
    assert set(END) == set(TransferState) - {TransferState.PENDING}
    for state, event in END.items():
        ends = {after for row in TABLE.values() for at, after in row.items() if at is event and after is not None}
        assert {end.state for end in ends} == {state}


# ---- what to send ----


@pytest.mark.parametrize(
    ("ready", "sent", "group", "in_flight", "may_send"),
    [
        (0, 0, 1, 0, False),
        (1, 0, 1, 0, True),
        (1, 1, 1, 0, False),
        (1, 0, 1, MAX_IN_FLIGHT - 1, True),
        (1, 0, 1, MAX_IN_FLIGHT, False),
        (1, 0, 2, 0, False),  # half a group
        (2, 0, 2, 0, True),
        (3, 2, 2, 0, True),  # the last layer waits for no other
        (3, 3, 1, 0, False),
        (0, 3, 1, 0, False),  # behind gates
        (1, 3, 1, 0, False),
    ],
)
def test_a_portion_leaves_when_a_group_is_ready_and_there_is_room(
    ready: int, sent: int, group: int, in_flight: int, may_send: bool
) -> None:
    progress = Progress(range(3))
    progress.on(Event.FIND)
    progress.on(Event.READY, ready)
    progress.on(Event.SEND, sent)
    assert progress.may_send(group, in_flight) == may_send


# ---- how far ----


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((), "the link to cluster 7 is not there yet"),
        (((Event.LINK, 0),), "cluster 7 has not reported its cache yet"),
        (((Event.LINK, 0), (Event.FIND, 0)), "0 of 2 layers have landed at cluster 7, layer 3 was not ready"),
        (
            ((Event.LINK, 0), (Event.FIND, 0), (Event.READY, 2), (Event.SEND, 2), (Event.LAND, 1)),
            "1 of 2 layers have landed at cluster 7, layer 4 has not landed",
        ),
        (((Event.LINK, 0), (Event.FIND, 0), (Event.SEND, 2), (Event.LAND, 2)), ""),
    ],
)
def test_it_says_how_far_it_has_got(steps: tuple[Step, ...], words: str) -> None:
    assert lived(steps).how_far("cluster 7") == words


# ---- nothing else changes it ----


def test_it_is_pure() -> None:
    used = {arrow.module for arrow in imports_of(PROGRESS, tree_of(PROGRESS))}
    assert {module for module in used if not module.startswith("aiodatadist.")} == {
        "__future__",
        "collections.abc",
        "enum",
        "typing",
    }


def test_only_progress_sets_its_attributes() -> None:
    wrong = [
        f"{module}:{node.lineno} sets {ast.unparse(node)}"
        for module in modules()
        if module.startswith("aiodatadist._layered.")
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and ast.unparse(node.value).endswith("progress")
        and node.attr in Progress.__slots__
    ]
    assert not wrong
