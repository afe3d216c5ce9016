"""The prefill end of pushed requests: what a model computes is sent layer by layer, to where the decode engine wants it.

**Ownership.** A transfer has one task, from its first mention to its end. The engine adds portions of its blocks, step
by step, and the decode engine says where they belong; either may come first. Portions are sent one after the other:
blocks that are computed again after a preemption overwrite what was pushed before.

**Names.** A transfer belongs to one request of this engine, and to the first ``want`` with the same name and the same
prompt. Anyone may know the name; a peer that knows the prompt as well gets what it could have computed itself.

**Reused names.** A name does not number its uses, so a message about a transfer may belong to an earlier one whose
other end never came. So a transfer that was given up or dropped before its other end came ends nothing later: it only
shortens, to ``patience``, the time for which the next end of that name and prompt waits for the other.

**Cancellation.** A transfer that is abandoned, dropped or cut off is answered with Refused once no more bytes of it
land.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from aiodatadist._adapters.ended import Tell
from aiodatadist._adapters.meaning import differences
from aiodatadist._adapters.peer_links import LinkedPeer
from aiodatadist._adapters.push_answers import Answers, Post
from aiodatadist._adapters.push_marks import DroppedTransfers
from aiodatadist._adapters.push_messages import Drop, More, TransferKey, Want
from aiodatadist._adapters.push_shares import WantShares
from aiodatadist._adapters.sendings import Portion, Sending
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._config.quotas import Quotas
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.descriptors import BlocksCacheKey
from aiodatadist._values.foreign import printable
from aiodatadist._values.peer_budget import Budget
from aiodatadist._wire.reasons import reason_of
from aiodatadist.errors import IncompatiblePeer, LLMException, ParamInvalid

logger = logging.getLogger(__name__)

_BegunKey = tuple[LinkedPeer, str, int]
"""A want that is not complete yet: its peer, name and number."""

REMEMBERED = 4096
"""Most ends of transfers that are kept for the engine, and for an end that has not come yet."""


class _Request(Enum):
    """The state of a transfer's request, as the engine has declared it."""

    UNKNOWN = auto()
    COMPUTING = auto()
    COMPUTED = auto()
    """All portions have come, and the blocks are kept."""
    GIVEN_UP = auto()


@dataclass(slots=True)
class _Want:
    """A peer's want, in little memory, because many wait.

    Attributes:
        difference: the difference of the two layouts; empty if there is none.
    """

    peer: LinkedPeer
    number: int
    first: int
    into: array[int]
    caches: int
    aux: int | None
    difference: str


@dataclass(slots=True, eq=False)
class _Push:
    """A transfer.

    Attributes:
        key: its name at both engines.
        owner: the engine's request whose blocks these are; empty until the engine names it.
        earlier: the outcome of an earlier transfer of this name and prompt whose other end had not come. That end may
            be the one for which this transfer waits, so this does not wait for long.
    """

    key: TransferKey
    portions: deque[Portion] = field(default_factory=deque)
    want: _Want | None = None
    request: _Request = _Request.UNKNOWN
    owner: str = ""
    earlier: str = ""
    aux: int | None = None
    scope: Scope = field(default_factory=Scope)
    news: Signal = field(default_factory=Signal)
    reason: LLMException | None = None
    sent: set[int] = field(default_factory=set)

    def stop(self, reason: LLMException) -> None:
        """Cancel it. The first reason counts."""
        self.reason = self.reason or reason
        self.scope.cancel()


def _places(want: _Want, portion: Portion) -> dict[int, tuple[int, int]]:
    """Return where a portion's blocks go: source and destination by their place in the request."""
    numbered = enumerate(portion.blocks, portion.first - want.first)
    return {place: (block, want.into[place]) for place, block in numbered if 0 <= place < len(want.into)}


class OutgoingPushes:
    """The outgoing pushes of one worker.

    Args:
        sending: the way in which portions travel.
        layout: properties that a peer's cache must have.
        seconds: time for which a computed request's blocks are kept for a peer that has not said where they belong.
        want_seconds: time for which a peer's want is kept for a request that the engine has not named.
        patience: seconds of either, if the other end may have come and gone.
        accepted: names of properties that may differ from a peer's layout.
        check: raises LLMException if the peer's link has ended, so that its blocks may be another request's.
        quotas: the limits of a peer's wants; the defaults if it is None.
    """

    def __init__(
        self,
        sending: Sending,
        layout: dict[str, str | int],
        seconds: float,
        want_seconds: float,
        patience: float,
        tasks: Spawner,
        check: Callable[[LinkedPeer], object],
        post: Post,
        tell: Tell,
        accepted: Container[str] = (),
        incidents: Incidents | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._incidents = incidents or Incidents()
        self._sending = sending
        self._accepted = accepted
        self._layout = layout
        self._seconds = seconds
        self._want_seconds = want_seconds
        self._patience = patience
        self._tasks = tasks
        self._check_linked = check
        self._tell = tell
        self._pushes: dict[TransferKey, _Push] = {}
        self._computed: dict[str, set[TransferKey]] = {}  # transfers of this engine's requests, by name
        # outcomes of transfers whose request continues
        self._ended: OrderedDict[str | TransferKey, str] = OrderedDict()
        # outcomes of transfers that no peer had asked for
        self._given_up: OrderedDict[TransferKey, str] = OrderedDict()
        self._dropped = DroppedTransfers()  # outcomes of transfers that the engine had not named
        self._numbered: dict[tuple[LinkedPeer, int], _Push] = {}  # by peer and number of their wants
        self._begun: dict[_BegunKey, array[int]] = {}
        self._names: Counter[str] = Counter()  # names of transfers that peers want
        self._shares = WantShares[_Push | _BegunKey](quotas)  # shares of waiting wants, complete or not
        self._answers = Answers(tasks, post, self._incidents)

    # ---- what the engine says ----

    def add(self, key: TransferKey, portion: Portion, request: str = "") -> None:
        """Add a portion that a step of the model is about to compute.

        ``request`` is the engine's name for its request, if known yet.
        """
        push = self._of_engine(key, request)
        if isinstance(push, _Push):
            push.portions.append(portion)
            push.news.wake()

    def complete(self, key: TransferKey, request: str, aux: int | None = None) -> None:
        """Declare that there are no more portions. Blocks and ``aux`` are kept until the request is in ``sent``."""
        push = self._of_engine(key, request)
        if not isinstance(push, _Push):
            how = push
            self._forget_ended(key, request)
            self._tell(lambda ended: ended.let_go(request, how))
            return
        push.request, push.aux = _Request.COMPUTED, aux
        self._set_limit(push)
        push.news.wake()

    def abandon(self, key: TransferKey, request: str = "") -> None:
        """End a request that was not computed, or whose blocks are no longer kept."""
        push = self._pushes.get(key)
        if self._forget_ended(key, request):
            return
        if push is None:
            if self._dropped.take(key) is None:  # otherwise both ends have ended
                _keep(self._given_up, key, "push_stopped")
        elif push.request is _Request.UNKNOWN:
            self._shorten(push)  # the want may be another request's, which is still to come
        elif not (request and push.owner and push.owner != request):
            push.request = _Request.GIVEN_UP
            push.stop(ParamInvalid("the request was aborted at the prefill engine"))
            self._free_name(push, "push_stopped")

    def _of_engine(self, key: TransferKey, request: str) -> _Push | str:
        """Return the transfer of a request, or how it ended: ``push_refused`` if it is another request's."""
        for name in (request, key):
            if (how := self._ended.get(name)) is not None:
                return how
        push = self._pushes.get(key)
        if push is None:
            push = self._begin(key, self._dropped.take(key) or "")
            self._given_up.pop(key, None)  # an earlier request's: the next want is of this one
        if request and push.owner and push.owner != request:
            words = "request %s: transfer %s is request %s's"
            self._incidents.add(Incident.NAME_TAKEN, logger, words, printable(request), key, printable(push.owner))
            _keep(self._ended, request, "push_refused")
            self._tell(lambda ended: ended.outcomes.update({request: "push_refused"}))
            return "push_refused"
        push.owner = push.owner or request
        if push.request is _Request.UNKNOWN:
            push.request = _Request.COMPUTING
            if push.want is not None:
                self._shares.is_known(push.want.peer.cluster_id, push)
            self._set_limit(push)
            self._computed.setdefault(key.name, set()).add(key)
        return push

    def _forget_ended(self, key: TransferKey, request: str) -> bool:
        """Forget a request that has ended. Return True if its transfer had ended before."""
        by_request, by_key = (self._ended.pop(name, None) for name in (request, key))
        return by_request is not None or by_key is not None

    # ---- what peers say ----

    def more(self, peer: LinkedPeer, more: More) -> None:
        """Take the first block numbers of a want that follows."""
        key = peer, more.transfer, more.number
        if not self._shares.fits(peer.cluster_id, key, len(more.into)):  # its want stays incomplete, and is refused
            self._tell(lambda ended: ended.counters.update(wants_refused=1))
            return
        self._begun.setdefault(key, array("q")).extend(more.into)
        self._give_way(self._shares.add(peer.cluster_id, key, len(more.into)))

    def _give_way(self, asked: Mapping[_Push | _BegunKey, Budget]) -> None:
        """End the wants that have waited longest for their requests: later wants of the same peer took their place."""
        for each, limit in asked.items():
            self._tell(lambda ended: ended.counters.update(wants_refused=1))
            if isinstance(each, _Push):
                why = _too_many(limit, self._shares.limit(limit))
                self._stop(each, f"its request had not come, and it gave way to a later one: {why}")
            else:  # its want stays incomplete, and is refused
                self._begun.pop(each, None)

    def _take_begun(self, key: _BegunKey) -> array[int]:
        self._shares.remove(key[0].cluster_id, key)
        return self._begun.pop(key, None) or array("q")

    def want(self, peer: LinkedPeer, want: Want) -> None:
        """Take a peer's want."""
        into = self._take_begun((peer, want.transfer, want.number))
        into.extend(want.into)
        if why := self._why_not(peer, want, len(into)):
            self._refuse(peer, want, why)
            return
        push = self._pushes.get(want.key) or self._begin(want.key, self._given_up.pop(want.key, ""))
        self._dropped.take(want.key)  # an earlier want was dropped: the engine's next request has this one
        difference = self._difference(want.layout)
        push.want = _Want(peer, want.number, want.first, into, want.caches, want.aux, difference)
        if want.number:
            self._numbered[peer, want.number] = push
        is_known = push.request is not _Request.UNKNOWN
        self._give_way(self._shares.add(peer.cluster_id, push, len(into), is_known))
        self._set_limit(push)
        push.news.wake()
        self._names[want.transfer] += 1
        if self._names[want.transfer] == 1:
            self._tell(lambda ended: ended.begins_to_want(want.transfer))

    def _why_not(self, peer: LinkedPeer, want: Want, blocks: int) -> str:
        """Return why the blocks will not come; empty if they may.

        Other prompts of this name do not matter: this one's request may still come.
        """
        if blocks != want.count:
            return f"it is for {want.count} blocks, but names {blocks}: too many are waiting"
        if (peer, want.number) in self._numbered:
            return "another want has this number"
        push = self._pushes.get(want.key)
        if push is not None and push.want is not None:
            return "another request has this name"
        if not self._shares.fits(peer.cluster_id, None, blocks):
            self._tell(lambda ended: ended.counters.update(wants_refused=1))
            return _too_many(Budget.WANT_BLOCKS, self._shares.limit(Budget.WANT_BLOCKS))
        return ""

    def drop(self, peer: LinkedPeer, drop: Drop) -> None:
        """Drop a transfer. Answered in any case, because the peer waits for it.

        Another prompt, or an earlier use of the name, ends nothing.
        """
        self._take_begun((peer, drop.transfer, drop.number))
        if drop.number:
            wanted = self._numbered.get((peer, drop.number))
            if wanted is not None:
                self._stop(wanted, "the decode engine dropped it")
                return  # answered once no more bytes of it land
        elif (push := self._pushes.get(drop.key)) is None:
            if self._given_up.pop(drop.key, None) is None:  # otherwise both ends have ended
                self._remember_dropped(peer, drop.key, "push_stopped")
        elif push.want is None:
            self._shorten(push)
        self._refuse(peer, drop, "it was dropped")

    def _remember_dropped(self, peer: LinkedPeer, key: TransferKey, how: str) -> None:
        try:
            self._check_linked(peer)
        except LLMException:  # :meth:`lost` has been called, or does not know this link
            self._dropped.add(None, key, how)
        else:
            self._dropped.add(peer.cluster_id, key, how)

    def _refuse(self, peer: LinkedPeer, asked: Want | Drop, why: str) -> None:
        self._answers.refused(peer, asked.transfer, asked.number, why)

    def lost(self, peer: LinkedPeer) -> None:
        """Stop the transfers of a peer whose link has ended."""
        for key in [key for key in self._begun if key[0] == peer]:
            self._take_begun(key)
        for push in list(self._pushes.values()):
            if push.want is not None and push.want.peer == peer:
                self._stop(push, "the link to the decode engine has ended")
        self._dropped.peer_gone(peer.cluster_id)

    # ---- one transfer ----

    def _begin(self, key: TransferKey, earlier: str) -> _Push:
        push = self._pushes[key] = _Push(key, earlier=earlier)
        self._tasks.start_soon(self._run, push)
        return push

    def _set_limit(self, push: _Push) -> None:
        """Set how long it waits for the end that has not come yet."""
        if push.want is None:
            seconds = self._seconds if push.request is _Request.COMPUTED else math.inf
        else:
            seconds = self._want_seconds if push.request is _Request.UNKNOWN else math.inf
        if push.earlier and seconds < math.inf:
            seconds = self._patience
        push.scope.deadline = asyncio.get_running_loop().time() + seconds

    def _shorten(self, push: _Push) -> None:
        """Shorten its wait: the end that has not come yet may be gone."""
        if not push.earlier:
            push.earlier = "push_stopped"
            self._set_limit(push)

    def _stop(self, push: _Push, why: str) -> None:
        """End a transfer that its peer no longer wants."""
        push.stop(LLMException(why))
        if push.request is _Request.UNKNOWN:  # no byte of it is being sent
            self._free_name(push, "push_stopped")

    async def _run(self, push: _Push) -> None:
        refusal: str | None = "the prefill engine is ending"
        how = "push_cancelled"
        try:
            refusal, how = await self._outcome(push)
        finally:
            self._end(push, how)
        if push.want is None:
            return
        if refusal is None:
            self._answers.sent(push.want.peer, push.key.name, push.want.number)
        else:
            self._answers.refused(push.want.peer, push.key.name, push.want.number, refusal)

    async def _outcome(self, push: _Push) -> tuple[str | None, str]:
        """Return why its peer is refused, or None, and how it ended."""
        is_done = False
        try:
            with push.scope:
                await self._carry_out(push)
                is_done = True
        except LLMException as error:
            push.reason = push.reason or error
            words = "transfer %s: its blocks cannot be pushed: %s"
            self._incidents.add(Incident.PUSH_FAILED, logger, words, push.key, error)
            return reason_of(push.reason), "push_failed"
        if is_done:
            return None, "push_done"
        if push.reason is not None:
            return reason_of(push.reason), "push_stopped"
        return self._why_in_vain(push), push.earlier or "push_expired"

    def _why_in_vain(self, push: _Push) -> str:
        """Return why one end waited too long for the other."""
        if push.want is None:
            return f"no engine asked for the blocks within {self._seconds:g} seconds"
        if push.earlier:
            return f"it has already ended: {push.earlier}"
        if self._computed.get(push.key.name):
            self._tell(lambda ended: ended.counters.update(push_another_prompt=1))
            return "another prompt"
        return f"its request did not come within {self._want_seconds:g} seconds"

    def _end(self, push: _Push, how: str) -> None:
        self._free_name(push, how)
        if push.want is not None:
            self._shares.remove(push.want.peer.cluster_id, push)
            self._numbered.pop((push.want.peer, push.want.number), None)
        if push.request is _Request.COMPUTED:
            self._tell(lambda ended: ended.let_go(push.owner, how))

    def _free_name(self, push: _Push, how: str) -> None:
        """Let the next word about this name and prompt be about another transfer."""
        key = push.key
        if self._pushes.get(key) is not push:
            return
        del self._pushes[key]
        if computed := self._computed.get(key.name):
            computed.discard(key)
            if not computed:
                del self._computed[key.name]
        if push.request is _Request.COMPUTING:
            _keep(self._ended, push.owner or key, how)
        want = push.want
        if want is None:
            _keep(self._given_up, key, how)
            return
        if push.request is _Request.UNKNOWN:
            self._remember_dropped(want.peer, key, how)
        self._names[key.name] -= 1
        if not self._names[key.name]:
            del self._names[key.name]
            self._tell(lambda ended: ended.wants_no_more(key.name))

    async def _carry_out(self, push: _Push) -> None:
        want = await self._wanted(push)
        if want.difference:
            raise IncompatiblePeer(want.difference)
        while push.portions or push.request is not _Request.COMPUTED:
            if push.portions:
                await self._send(push, want, push.portions.popleft())
            else:
                await push.news.wait()
        missing = len(want.into) - len(push.sent)
        if missing:
            raise ParamInvalid(f"the peer wants {len(want.into)} blocks: {missing} of them were not computed here")
        if want.aux is not None and push.aux is not None:
            await self._sending.send_aux(_caches_of(want), push.aux, want.aux, self._check_of(want))

    @staticmethod
    async def _wanted(push: _Push) -> _Want:
        while True:
            want = push.want
            if want is not None:
                return want
            await push.news.wait()

    def _difference(self, layout: dict[str, str | int]) -> str:
        """Return the first difference of a peer's layout, with both values; empty if there is none."""
        for name, (mine, theirs) in differences(self._layout, layout, self._accepted).items():
            return printable(f"{name} is {mine} at the prefill engine and {theirs} at the decode engine")
        return ""

    async def _send(self, push: _Push, want: _Want, portion: Portion) -> None:
        """Send a portion, each layer once it is computed."""
        places = _places(want, portion)
        if not places:
            return
        sources, targets = zip(*places.values(), strict=True)
        check = self._check_of(want)
        nbytes = await self._sending.send(_caches_of(want), portion, sources, targets, check)
        push.sent.update(places)
        self._tell(lambda ended: ended.counters.update(pushed_blocks=len(places), pushed_bytes=nbytes))

    def _check_of(self, want: _Want) -> Callable[[], object]:
        return lambda: self._check_linked(want.peer)


def _caches_of(want: _Want) -> BlocksCacheKey:
    return BlocksCacheKey(want.peer.cluster_id, want.caches)


def _too_many(limit: Budget, most: int) -> str:
    return f"too many are waiting: the limit of a peer's {limit.value} is {most}"


def _keep(names: OrderedDict[Any, str], name: object, how: str) -> None:
    """Remember an outcome; forget the oldest if there are too many."""
    names[name] = how
    names.move_to_end(name)
    if len(names) > REMEMBERED:
        names.popitem(last=False)
