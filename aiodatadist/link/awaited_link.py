"""A link that broke and is being made again, as transfers see it that were asked for meanwhile: they wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiodatadist.cache.table import Entry
from aiodatadist.device import TransferCompletion, TransferState, give_way
from aiodatadist.errors import CacheNotFound, InternalError, LLMException, NotLinked
from aiodatadist.link.leased_pull import KeptBlocks
from aiodatadist.link.link import Link
from aiodatadist.link.notifications import check_payload
from aiodatadist.link.remote_operation import RemoteOperation, TransferSpec
from aiodatadist.values.foreign import printable

Begin = Callable[[Link], TransferCompletion]


class Waiting(Protocol):
    """What waits for a link, and is told once: that it is there, or why it will not be."""

    def begin(self, link: Link) -> None:
        """Whatever this raises is what it fails with."""

    def fail(self, error: LLMException) -> None: ...


class WaitingTransfer(RemoteOperation):
    """A transfer that begins when its link is there. Until it has begun it leases the cache at this end, and nothing else.

    Args:
        begin: starts it on the link.
    """

    __slots__ = ("_begin", "_is_leased", "_spec")

    def __init__(self, name: str, spec: TransferSpec, begin: Begin) -> None:
        super().__init__(name, 0.0)
        self._spec = spec
        self._begin = begin
        self._is_leased = True
        spec.entry.lease()
        self.add_done_callback(lambda _: self._let_go_of_cache())

    @property
    def quiesce_seconds(self) -> float:
        return super().quiesce_seconds if self._transfer is None else self._transfer.quiesce_seconds

    def begin(self, link: Link) -> None:
        """The link is there."""
        check_still_usable(self._spec.entry)
        transfer = self._begin(link)
        self._let_go_of_cache()
        self.follow(transfer)

    def fail(self, error: LLMException) -> None:
        self.finish(TransferState.FAILED, error)

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self.finish(TransferState.CANCELLED)
        return True

    def _let_go_of_cache(self) -> None:
        if self._is_leased:
            self._is_leased = False
            self._spec.entry.release()


def check_still_usable(entry: Entry) -> None:
    """Raises CacheNotFound: the cache of what has waited is not this end's to fill or to read any more."""
    if not entry.is_usable:
        raise CacheNotFound(f"cache {entry.cache_id} cannot be used any more")


class AwaitedLink:
    """What :meth:`begin` and :meth:`start_leased` start, and what is added, waits for the link, in the order of the calls.

    Args:
        seconds: for which each waits, at most.
        why: what the link broke of, or what the last attempt failed with.
        instance: of the peer, as it was when the link was made the last time.
    """

    def __init__(
        self, cluster_id: int, seconds: float, why: Callable[[], LLMException | None], instance: Callable[[], str]
    ) -> None:
        self.cluster_id = cluster_id
        self.instance = instance
        self._seconds = seconds
        self._why = why
        self._waiting: dict[Waiting, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, spec: TransferSpec, what: str, notify: bytes | None) -> WaitingTransfer:
        """As :meth:`Link.begin`. Raises TypeError, ParamInvalid: the notification's payload is wrong."""
        if notify is not None:
            check_payload(notify)
        return self._wait(what, spec, lambda link: link.begin(spec, what, notify), self._seconds)

    def start_leased(self, spec: TransferSpec, kept: KeptBlocks, seconds: float, what: str) -> WaitingTransfer:
        """As :meth:`Link.start_leased`: ``seconds`` are for waiting, too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        def begin(link: Link) -> TransferCompletion:
            return link.start_leased(spec, kept, max(deadline - loop.time(), 0.0), what)

        return self._wait(what, spec, begin, min(seconds, self._seconds))

    def _wait(self, what: str, spec: TransferSpec, begin: Begin, seconds: float) -> WaitingTransfer:
        name = f"{what} of cluster {self.cluster_id}"
        waiting = WaitingTransfer(name, spec, begin)
        self.add(waiting, seconds)
        waiting.add_done_callback(self.drop)
        return waiting

    def add(self, waiting: Waiting, seconds: float | None = None) -> None:
        """It waits for so many seconds, or as long as transfers do; then it fails."""
        limit = self._seconds if seconds is None else seconds
        self._waiting[waiting] = asyncio.get_running_loop().call_later(limit, self._out_of_time, waiting, limit)

    def drop(self, waiting: Waiting) -> None:
        """It does not wait any more, if it did."""
        timer = self._waiting.pop(waiting, None)
        if timer is not None:
            timer.cancel()

    async def begin_all(self, link: Link) -> None:
        """The link is there: what waits begins. What has not begun when it breaks again waits on."""
        for waiting in list(self._waiting):
            if not link.is_ready:
                return
            if waiting in self._waiting:
                self.drop(waiting)
                self._begin(waiting, link)
                await give_way()

    def _begin(self, waiting: Waiting, link: Link) -> None:
        """No caller is here to be told what goes wrong, and those that wait behind it are not to blame."""
        try:
            waiting.begin(link)
        except LLMException as error:
            waiting.fail(error)
        except Exception as error:
            failure = InternalError(f"it could not begin: {printable(repr(error))}", peer=link.cluster_id)
            failure.__cause__ = error
            waiting.fail(failure)

    def fail(self, why: LLMException) -> None:
        """The link will not be there."""
        for waiting in list(self._waiting):
            self.drop(waiting)
            waiting.fail(type(why)(*why.args, peer=self.cluster_id, hint=why.hint))

    def _out_of_time(self, waiting: Waiting, seconds: float) -> None:
        self.drop(waiting)
        waiting.fail(self._too_late(seconds))

    def _too_late(self, seconds: float) -> NotLinked:
        why = self._why()
        reason = "" if why is None else f": {why.args[0]}"
        error = NotLinked(
            f"cluster {self.cluster_id} was not linked again within {seconds:g} s{reason}",
            peer=self.cluster_id,
            hint="it is still being tried",
        )
        error.retryable = True
        return error
