"""A link that broke and is being made again, as transfers see it that were asked for meanwhile: they wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodatadist.device import TransferCompletion, TransferState, give_way
from aiodatadist.errors import CacheNotFound, InternalError, LLMException, NotLinked
from aiodatadist.link.link import Link
from aiodatadist.link.notifications import check_payload
from aiodatadist.link.remote_operation import RemoteOperation, TransferSpec

Begin = Callable[[Link], TransferCompletion]


class WaitingTransfer(RemoteOperation):
    """A transfer that begins when its link is there. Until it has begun it leases the cache at this end, and nothing else.

    Args:
        begin: starts it on the link.
        late: what it fails with if the link is not there after so many seconds.
    """

    __slots__ = ("_begin", "_is_leased", "_late", "_spec", "_timer")

    def __init__(
        self, name: str, spec: TransferSpec, begin: Begin, seconds: float, late: Callable[[], LLMException]
    ) -> None:
        super().__init__(name, 0.0)
        self._spec = spec
        self._begin = begin
        self._late = late
        self._timer = asyncio.get_running_loop().call_later(seconds, self._out_of_time)
        self._is_leased = True
        spec.entry.lease()
        self.add_done_callback(lambda _: self._waits_no_more())

    @property
    def quiesce_seconds(self) -> float:
        return super().quiesce_seconds if self._transfer is None else self._transfer.quiesce_seconds

    def begin(self, link: Link) -> None:
        """The link is there. One whose cache is not this end's to fill or to read any more fails."""
        entry = self._spec.entry
        if not entry.is_usable:
            self.finish(TransferState.FAILED, CacheNotFound(f"cache {entry.cache_id} cannot be used any more"))
            return
        try:
            transfer = self._begin(link)
        except LLMException as error:
            self.finish(TransferState.FAILED, error)
        except Exception as error:  # no caller is here to be told, and those that wait behind it are not to blame
            failure = InternalError(f"it could not begin: {error!r}", peer=link.cluster_id)
            failure.__cause__ = error
            self.finish(TransferState.FAILED, failure)
        else:
            self._waits_no_more()
            self.follow(transfer)

    def _out_of_time(self) -> None:
        self.finish(TransferState.FAILED, self._late())

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self.finish(TransferState.CANCELLED)
        return True

    def _waits_no_more(self) -> None:
        self._timer.cancel()
        if self._is_leased:
            self._is_leased = False
            self._spec.entry.release()


class AwaitedLink:
    """What :meth:`begin` and :meth:`begin_leased` start waits for the link, in the order of the calls.

    Args:
        seconds: for which each waits, at most.
        why: what the link broke of, or what the last attempt failed with.
    """

    def __init__(self, cluster_id: int, seconds: float, why: Callable[[], LLMException | None]) -> None:
        self.cluster_id = cluster_id
        self._seconds = seconds
        self._why = why
        self._waiting: dict[WaitingTransfer, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, spec: TransferSpec, what: str, notify: bytes | None) -> WaitingTransfer:
        """As :meth:`Link.begin`. Raises TypeError, ParamInvalid: the notification's payload is wrong."""
        if notify is not None:
            check_payload(notify)
        return self._wait(what, spec, lambda link: link.begin(spec, what, notify), self._seconds)

    def start_leased(
        self, spec: TransferSpec, lease: str, seconds: float, patience: float, takers: int, what: str
    ) -> WaitingTransfer:
        """As :meth:`Link.start_leased`: ``seconds`` are for waiting, too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        def begin(link: Link) -> TransferCompletion:
            return link.start_leased(spec, lease, max(deadline - loop.time(), 0.0), patience, takers, what)

        return self._wait(what, spec, begin, min(seconds, self._seconds))

    def _wait(self, what: str, spec: TransferSpec, begin: Begin, seconds: float) -> WaitingTransfer:
        name = f"{what} of cluster {self.cluster_id}"
        waiting = WaitingTransfer(name, spec, begin, seconds, lambda: self._too_late(seconds))
        self._waiting[waiting] = None
        waiting.add_done_callback(lambda _: self._waiting.pop(waiting, None))
        return waiting

    async def begin_all(self, link: Link) -> None:
        """The link is there: what waits begins. What has not begun when it breaks again waits on."""
        for waiting in list(self._waiting):
            if not link.is_ready:
                return
            if waiting in self._waiting:
                del self._waiting[waiting]
                waiting.begin(link)
                await give_way()

    def fail(self, why: LLMException) -> None:
        """The link will not be there."""
        for waiting in list(self._waiting):
            waiting.finish(TransferState.FAILED, type(why)(*why.args, peer=self.cluster_id))

    def _too_late(self, seconds: float) -> NotLinked:
        why = self._why()
        reason = "" if why is None else f": {why.args[0]}"
        return NotLinked(
            f"cluster {self.cluster_id} was not linked again within {seconds:g} s{reason}",
            peer=self.cluster_id,
            hint="it is still being tried",
        )
