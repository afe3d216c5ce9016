"""A broken link that is being re-established: transfers that are requested meanwhile wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiodatadist._cache.table import Entry
from aiodatadist._device import TransferCompletion, TransferState, give_way
from aiodatadist._link.control.notifications import check_payload
from aiodatadist._link.data.remote_operation import RemoteOperation, TransferSpec
from aiodatadist._link.transfers.leased_pull import KeptBlocks
from aiodatadist._link.transfers.transfers import Transfers
from aiodatadist._values.foreign import printable
from aiodatadist.errors import CacheNotFound, InternalError, LLMException, NotLinked

Begin = Callable[[Transfers], TransferCompletion]


class Waiting(Protocol):
    """Something that waits for a link. One of its methods is called, or ``fail`` after a ``begin`` that raised."""

    def begin(self, link: Transfers) -> None:
        """Begin, because the link is ready. Whatever this raises is passed to :meth:`fail`."""

    def fail(self, error: LLMException) -> None:
        """Fail, because the link was not made or :meth:`begin` raised."""


class WaitingTransfer(RemoteOperation):
    """A transfer that begins once its link is ready. Until then it leases the cache at this end, and nothing else.

    Args:
        begin: starts the transfer on the link.
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

    def begin(self, link: Transfers) -> None:
        """Start the transfer: the link is ready."""
        check_still_usable(self._spec.entry)
        transfer = self._begin(link)
        # only now: the transfer has its own lease by then, so the cache is never without one
        self._let_go_of_cache()
        self.follow(transfer)

    def fail(self, error: LLMException) -> None:
        """Fail the transfer: the link was not made, or the transfer could not begin."""
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
    """Raise CacheNotFound if the cache was given up while its transfer waited."""
    if not entry.is_usable:
        raise CacheNotFound(f"cache {entry.cache_id} can no longer be used")


class AwaitedLink:
    """The transfers that wait for one link, in the order of their calls.

    Args:
        seconds: how long each transfer waits, at most.
        why: returns the error that broke the link, or that of the last attempt to re-establish it.
        instance: returns the peer's instance, as it was when the link was last made.
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
        """Begin a transfer, as :meth:`Transfers.begin` does, once the link is ready.

        Raises TypeError or ParamInvalid if the notification's payload is wrong.
        """
        if notify is not None:
            check_payload(notify)
        return self._wait(what, spec, lambda link: link.begin(spec, what, notify), self._seconds)

    def start_leased(self, spec: TransferSpec, kept: KeptBlocks, seconds: float, what: str) -> WaitingTransfer:
        """Start a leased pull, as :meth:`Transfers.start_leased` does, once the link is ready.

        ``seconds`` include the wait.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        def begin(link: Transfers) -> TransferCompletion:
            return link.start_leased(spec, kept, max(deadline - loop.time(), 0.0), what)

        return self._wait(what, spec, begin, min(seconds, self._seconds))

    def _wait(self, what: str, spec: TransferSpec, begin: Begin, seconds: float) -> WaitingTransfer:
        name = f"{what} of cluster {self.cluster_id}"
        waiting = WaitingTransfer(name, spec, begin)
        self.add(waiting, seconds)
        waiting.add_done_callback(self.drop)
        return waiting

    def add(self, waiting: Waiting, seconds: float | None = None) -> None:
        """Let something wait for ``seconds``, then fail it. If None, it waits as long as transfers do."""
        limit = self._seconds if seconds is None else seconds
        self._waiting[waiting] = asyncio.get_running_loop().call_later(limit, self._out_of_time, waiting, limit)

    def drop(self, waiting: Waiting) -> None:
        """Let something wait no longer. No effect if it does not wait."""
        timer = self._waiting.pop(waiting, None)
        if timer is not None:
            timer.cancel()

    async def begin_all(self, link: Transfers) -> None:
        """Begin everything that waits, because the link is ready. If it breaks again, the rest continue to wait."""
        # a copy, looked at again below: while others have their turn, one may be cancelled or run out of time
        for waiting in list(self._waiting):
            if not link.session.is_ready:
                return
            if waiting in self._waiting:
                self.drop(waiting)
                self._begin(waiting, link)
                await give_way()

    def _begin(self, waiting: Waiting, link: Transfers) -> None:
        """Begin one of them; if that raises, fail it with the error.

        No caller is here to see the exception, and those that wait behind this one must begin all the same.
        """
        try:
            waiting.begin(link)
        except LLMException as error:
            waiting.fail(error)
        except Exception as error:
            failure = InternalError(f"the transfer could not begin: {printable(repr(error))}", peer=link.cluster_id)
            failure.__cause__ = error
            waiting.fail(failure)

    def fail(self, why: LLMException) -> None:
        """Fail everything that waits: the link will not be re-established."""
        for waiting in list(self._waiting):
            self.drop(waiting)
            # a new exception for each: one that is raised twice collects the tracebacks of both
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
            hint="the link is still being re-established",
        )
        error.retryable = True
        return error
