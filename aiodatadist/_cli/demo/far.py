"""The two halves of the demo on two machines. What the parent passes on otherwise, they say to each other over their link.

Prefill listens, and decode links to it. Prefill tells decode the job; decode tells prefill what came of it, so that both ends
show the same, and end with the same verdict.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
from pydantic import ValidationError

from aiodatadist import LLMConfig, LLMDataDist, LLMException, LLMRole, NotLinked
from aiodatadist._cli.demo.decode import decoded
from aiodatadist._cli.demo.messages import WORD, Failed, FarJob, Finished, Job, Met, Prefilled, Receiving
from aiodatadist._cli.demo.prefill import prefilled
from aiodatadist._cli.demo.worker import DECODE_CLUSTER, PREFILL_CLUSTER, link_to, opened
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.pipes import Message, Parent
from aiodatadist._cli.kit.place import place_options
from aiodatadist._config.secret_files import read_key
from aiodatadist._values.addresses import host_port
from aiodatadist._values.foreign import printable
from aiodatadist.errors import ParamInvalid

LINK_MILLISECONDS = 30_000
TRANSFER_MILLISECONDS = 60_000
"""Milliseconds for a transfer: 64 MiB over a network of a megabyte per second."""

OrderT = TypeVar("OrderT", bound=Message)


class FarEnd:
    """The other half, on another machine, in the place of the parent that passes its messages on.

    Args:
        parent: this half's parent, which is told the progress.
        name: the other half.
    """

    def __init__(self, parent: Parent, datadist: LLMDataDist, cluster_id: int, name: str) -> None:
        self._parent = parent
        self._datadist = datadist
        self._cluster_id = cluster_id
        self._name = name

    async def met(self) -> None:
        """Report to the parent how this half has met the other."""
        (link,) = self._datadist.statistics().links
        proof = f"both proved {printable(link.credential)}" if link.credential else "neither proved anything"
        words = f"linked to {self._name}: {proof}, and bytes travel by {link.transport}"
        await self._parent.report(Met(words=words))

    async def report(self, message: Message) -> None:
        """Send a message that is for the other half, or pass one to the parent."""
        if isinstance(message, (Job, Prefilled, Receiving, Finished, Failed)):
            await self._datadist.notify(self._cluster_id, message.line())
        else:
            await self._parent.report(message)

    async def order(self, kind: type[OrderT]) -> OrderT:
        """Return the other half's next message.

        Raises CommandError if it is of another kind, if the other half has failed, or if the link has ended.
        """
        word: Message | None = None
        reason = ""
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                nonlocal reason
                try:
                    reason = await self._datadist.wait_link_closed(self._cluster_id)
                except NotLinked as error:
                    reason = str(error.args[0])
                group.cancel_scope.cancel()

            group.start_soon(watch)
            async for note in self._datadist.notifications():
                word = self._read(note.payload)
                break
            group.cancel_scope.cancel()
        if word is None:
            raise CommandError(f"the link to {self._name} has ended: {printable(reason)}")
        if isinstance(word, Failed):
            raise CommandError(f"{self._name} failed: {printable(word.message)}")
        if not isinstance(word, kind):
            raise CommandError(f"{self._name} sent {type(word).__name__} when {kind.__name__} was expected")
        return word

    def _read(self, payload: bytes) -> Message:
        try:
            return WORD.validate_json(payload)
        except ValidationError as error:
            why = f"{self._name} sent what no demo of this version says: {error.error_count()} errors"
            raise CommandError(why) from None


@asynccontextmanager
async def _open(role: LLMRole, cluster_id: int, far: FarJob) -> AsyncIterator[LLMDataDist]:
    """Open the library for one half. Raises CommandError if its address or its key cannot be used."""
    try:
        key = read_key(Path(far.key_file), "--auth-key-file") if far.key_file else None
        config = LLMConfig(
            listen_ip_info=far.listen or None,
            transport=far.transport,
            auth_key=key,
            sync_kv_timeout=TRANSFER_MILLISECONDS,
            **await place_options(far.place),
        )
        datadist = LLMDataDist(role, cluster_id, config)
    except ParamInvalid as error:
        raise wrong_input(str(error)) from error
    async with opened(datadist):
        yield datadist


async def _meet(_: int) -> None:
    """Do nothing: the two halves are linked already."""


async def prefill_far(parent: Parent) -> None:
    """Wait for decode, give it the job and the prompt's cache, and report what came of it."""
    far = await parent.order(FarJob)
    assert far.job is not None
    async with _open(LLMRole.PROMPT, PREFILL_CLUSTER, far) as datadist:
        assert datadist.listen_address is not None
        place = host_port(*datadist.listen_address)
        words = f"waiting at {place}; on the other machine: aiodatadist demo --peer {place}"
        await parent.report(Met(words=words))
        await datadist.wait_linked(DECODE_CLUSTER)
        end = FarEnd(parent, datadist, DECODE_CLUSTER, "decode")
        await end.met()
        async with _telling(end):
            await end.report(far.job)
            async with prefilled(end, far.job, datadist, _meet):
                finished = await end.order(Finished)
        await parent.report(finished)


async def decode_far(parent: Parent) -> None:
    """Link to prefill, ask it for the job, do it, and report what came of it to both ends."""
    far = await parent.order(FarJob)
    assert far.peer is not None
    host, port = far.peer
    async with _open(LLMRole.DECODER, DECODE_CLUSTER, far) as datadist:
        await link_to(datadist, PREFILL_CLUSTER, port, host, LINK_MILLISECONDS)
        end = FarEnd(parent, datadist, PREFILL_CLUSTER, "prefill")
        await end.met()
        async with _telling(end):
            job = await end.order(Job)
            async with decoded(end, job, datadist, _meet) as finished:
                await end.report(finished)
        await parent.report(finished)


@asynccontextmanager
async def _telling(end: FarEnd) -> AsyncIterator[None]:
    """Tell the other half if this one fails."""
    try:
        yield
    except (CommandError, LLMException) as error:
        try:
            await end.report(Failed(message=str(error)))
        except LLMException:  # the link has ended, too
            raise error from None
        raise
