"""Log lines that others cause: at most one of each kind a second, however many requests, peers or links are behind it.

A clock that stands still shows it: what is counted is lines of the package above DEBUG, and kinds of incidents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aiodatadist import new_lease_name
from aiodatadist._adapters.pull_orders import PullOrder, WorkerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.sendings import Portion
from aiodatadist._counting import Incidents
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair
from tests.hostile.test_logs import say
from tests.hostile.test_offers import PROMPT, End, offer, worker
from tests.hostile.vllm_names import both_halves
from tests.test_told_once import DESC

MANY = 40


class Lines(logging.Handler):
    """Log lines of the package above DEBUG."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.getMessage())

    def of(self, words: str) -> list[str]:
        return [line for line in self.all if words in line]


@pytest.fixture
def lines() -> Iterator[Lines]:
    made, logger = Lines(), logging.getLogger("aiodatadist")
    before = logger.level
    logger.addHandler(made)
    logger.setLevel(logging.INFO)
    try:
        yield made
    finally:
        logger.removeHandler(made)
        logger.setLevel(before)


class Clock:
    """Stands still. What was logged before does not count: a cluster says at its start what its options risk."""

    def __init__(self, lines: Lines, *held: Incidents) -> None:
        self.now = 1e9  # later than what was logged before
        self.before = [each.counts.copy() for each in held]
        self._held = held
        self._lines = lines
        for incidents in held:
            incidents.clock = lambda: self.now
        lines.all.clear()

    def check(self) -> None:
        """Check that each kind has at most two lines in two seconds, and that no line bypassed the limiter."""
        counts = [each.counts - before for each, before in zip(self._held, self.before, strict=True)]
        assert all(counts)
        assert len(self._lines.all) <= sum(min(count, 2) for each in counts for count in each.values()), self._lines.all


def incidents_of(end: End) -> Incidents:
    return end.service.incidents


def repeated(clock: Clock, once: Callable[[int], None]) -> None:
    """Repeat it many times in one second, and once in the next."""
    for number in range(MANY):
        once(number)
    clock.now += 1.0
    once(MANY)


def test_pulls_and_releases_of_engines_that_do_not_answer(lines: Lines) -> None:
    """Let a client choose the port, the lease and the number of workers; the address is one of ``peers``."""
    with closing((end := End(0, link_seconds=1)).service):
        clock = Clock(lines, incidents_of(end))
        source = WorkerAddress(
            cluster_id=9, host="127.0.0.1", port=9, cache_ids=(1,), layout=end.address.layout, memory=end.address.memory
        )

        def once(number: int) -> None:
            name = f"r{number}"
            end.service.pull(PullOrder(name, (source,), new_lease_name(), (1,), (2,), PROMPT))
            end.received(name)

        repeated(clock, once)
        assert incidents_of(end).counts["pull_failed"] == MANY + 1
        assert [line.endswith(f"(and {MANY - 1} more)") for line in lines.of("cannot be pulled")] == [False, True]
        clock.check()


def test_pushes_that_do_not_come(lines: Lines) -> None:
    with closing((end := End(0, link_seconds=1)).service):
        clock = Clock(lines, incidents_of(end))
        source = worker(cluster_id=9, port=9)
        place = {name: source[name] for name in ("cluster_id", "host", "port")}

        def once(number: int) -> None:
            name = f"r{number}"
            end.service.expect(ExpectOrder(name, WorkerAddress.model_validate({**source, **place}), name, 0, (1,)))
            end.received(name)

        repeated(clock, once)
        assert incidents_of(end).counts["push_missed"] == MANY + 1
        assert [line.endswith(f"(and {MANY - 1} more)") for line in lines.of("do not come")] == [False, True]
        clock.check()


def test_pushes_that_a_peer_wants_elsewhere_and_messages_that_are_none(lines: Lines) -> None:
    """A key holder wants blocks into a cache of another layout, and says what is no message."""
    prefill: Any = End(0)
    decode: Any = End(1)
    with closing(prefill.service), closing(decode.service):
        clock = Clock(lines, incidents_of(prefill), incidents_of(decode))

        def once(number: int) -> None:
            name = f"t{number}"
            want = (
                f'{{"kind": "want", "transfer": "{name}", "number": {number + 1}, "first": 0, "into": [0], "count": 1, '
                f'"caches": 0, "layout": {{"block_size": 17}}}}'
            )
            prefill.service.push(name, Portion(0, (3,), None))
            prefill.service.pushed(name, name)
            say(decode, prefill, [b"no message", want.encode()])
            until_sent(prefill, name)

        repeated(clock, once)
        counts = incidents_of(prefill).counts
        assert counts["push_failed"] == counts["message_unreadable"] == MANY + 1
        assert len(lines.of("cannot be pushed")) == len(lines.of("an unreadable message")) == 2
        clock.check()


def until_sent(end: End, request: str) -> None:
    sent: set[str] = set()
    while request not in sent:
        time.sleep(0)
        sent |= end.service.take().sent


async def test_links_that_are_made_and_broken(lines: Lines) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        both = [inside(each.datadist).totals.incidents for each in (prompt, decoder)]
        clock = Clock(lines, *both)
        for number in range(MANY + 1):
            clock.now += number == MANY
            await broken_and_made(prompt, decoder)
        assert [each.counts["link_lost"] + each.counts["link_ended"] for each in both] == [MANY + 1] * 2
        assert [line.endswith(f"(and {MANY - 1} more)") for line in lines.of("is linked to")][-2:] == [True, True]
        clock.check()


async def broken_and_made(one: Cluster, other: Cluster) -> None:
    links = inside(one.datadist).links.find(2), inside(other.datadist).links.find(1)
    links[0].session.lost("not from a test")
    for link in links:
        await link.wait_closed()
    assert (await other.datadist.link_clusters([cluster_info(one)])).status == 0
    await inside(one.datadist).links.wait_linked(2)


async def test_clusters_that_cannot_be_linked(lines: Lines) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        mine = inside(decoder.datadist).totals.incidents
        clock = Clock(lines, inside(prompt.datadist).totals.incidents, mine)
        info = cluster_info(prompt)
        info.remote_cluster_id = 77  # the address is another cluster's
        for number in range(MANY + 1):
            clock.now += number == MANY
            await decoder.datadist.link_clusters([info])
        await anyio.wait_all_tasks_blocked()
        assert mine.counts["link_failed"] == MANY + 1
        assert [line.endswith(f"(and {MANY - 1} more)") for line in lines.of("77")][-1:] == [True]
        clock.check()


@pytest.fixture
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as halves:
        yield halves


def test_requests_with_a_name_that_is_in_use(lines: Lines, vllm: SimpleNamespace) -> None:
    from aiodatadist._adapters.settings import Settings  # noqa: PLC0415 - beside the halves

    side: Any = vllm.scheduler_side.SchedulerSide(Settings(), 16, 8)
    clock = Clock(lines, side.incidents)
    for number in range(MANY + 2):
        clock.now += number == MANY + 1
        request = SimpleNamespace(
            request_id=f"r{number}", kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"},
            num_prompt_tokens=16, num_computed_tokens=0, prompt_token_ids=[0] * 16, lora_request=None, cache_salt=None,
            mm_features=[],
        )  # fmt: skip
        side.allocated(request, [1], 0)
        side.matched_tokens(
            SimpleNamespace(
                request_id="o",
                kv_transfer_params=offer(workers=[worker(host="10.0.0.9")]),
                num_prompt_tokens=160,
            ),
            0,
        )
    assert side.take_counters() == {"name_taken": MANY + 1, "offer_elsewhere": MANY + 2}
    assert len(lines.all) == 4
    clock.check()
