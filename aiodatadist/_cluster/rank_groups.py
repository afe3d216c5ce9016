"""Links for which all members ask at the same time, knowing only a rank table: upstream's ``link``."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import json
import logging
import os
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import anyio
from pydantic import BaseModel, ConfigDict, Field

from aiodatadist._config.trust import Key
from aiodatadist._transport.blob_exchange import meet, validate
from aiodatadist._transport.local_device import server_address
from aiodatadist._values.descriptors import RegisterMemStatus
from aiodatadist._values.foreign import Unreadable, read_foreign
from aiodatadist.errors import LinkError, LLMException, LLMStatusCode, NotLinked, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cluster.engine import Engine
    from aiodatadist._cluster.listener import Listener
    from aiodatadist._link import Link

logger = logging.getLogger(__name__)


class _MemberKey(Key):
    """A key of a member's links, which stands for the cluster's own key of which it is made."""

    own: Key | None = None

    @classmethod
    def of(cls, secret: bytes, own: Key | None) -> Self:
        """Make the key from a member's secret, and from the cluster's own key if there is one."""
        name, said = ("communicator", b"") if own is None else own
        made = cls(name, hmac.new(secret, b"aiodatadist member" + said, hashlib.sha256).digest())
        made.own = own
        return made

    @property
    def hash(self) -> bytes:
        """The hash of the own key; empty if there is none."""
        return b"" if self.own is None else self.own.hash


MAX_COMMUNICATORS = 512
"""Communicators of one cluster at a time."""
CONNECT_TIMEOUT = 120.0
"""Seconds for a link if neither ``link_total_time`` nor ``HCCL_CONNECT_TIMEOUT`` sets a limit."""
MAX_CONNECT_TIMEOUT = 1_000_000
"""The largest HCCL_CONNECT_TIMEOUT, in seconds."""
UNLINK = 3.0
"""Seconds that a peer has to agree to the end of a link."""


MAX_CARD = 4096
"""The largest message about itself that a member sends to the others, in bytes."""


class Card(BaseModel):
    """The message about itself that a member sends to the others: its listener's address, and its part of the key."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    cluster_id: int = Field(ge=0, lt=2**64)
    host: str = Field(max_length=64)
    port: int = Field(gt=0, lt=2**16)
    secret: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass
class _RankGroup:
    """A call of ``link``: the links to all other members, and the listener through which half of them are made."""

    listener: Listener
    status: RegisterMemStatus = RegisterMemStatus.PREPARING
    settled: anyio.Event = field(default_factory=anyio.Event)
    making: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    links: dict[int, Link] = field(default_factory=dict)


def own_address(rank_table: str, rank: int) -> str:
    """Return the address at which a member listens: its server's ``host_ip``, or else this machine's own address.

    ``server_id`` is a name, even if it looks like an address. A machine without a route to others reaches only members
    on the same server.

    Raises:
        ParamInvalid: if ``host_ip`` is not an address; or if it is missing, and this machine has no address towards
            members on other servers.
    """
    servers = json.loads(rank_table)["server_list"]
    mine = next(server for server in servers if any(int(device["rank_id"]) == rank for device in server["device"]))
    given = mine.get("host_ip")
    if given is None:
        found = server_address() or ("127.0.0.1" if len(servers) == 1 else "")
        if not found:
            raise ParamInvalid(f"the server of rank {rank} has no host_ip, and this machine no route to the others")
        return found
    try:
        return str(ipaddress.ip_address(given if isinstance(given, str) else ""))
    except ValueError:
        raise ParamInvalid(f"host_ip of the server of rank {rank} is {given!r}: must be an IP address") from None


class RankGroups:
    """The symmetric links of one cluster.

    Members meet through HCCL itself and tell each other where they listen. Of each pair, the lower rank listens and the
    higher one connects; from there on a link is like any other. Listeners use a fresh key that only the members know.
    """

    def __init__(self, engine: Engine, link_total_time: int) -> None:
        self._engine = engine
        self._link_total_time = link_total_time
        self._ids = itertools.count(1)
        self._all: dict[int, _RankGroup] = {}

    def _seconds(self) -> float:
        """Return the time limit of a link. Raises ParamInvalid if the environment does not have a number of seconds."""
        text = os.environ.get("HCCL_CONNECT_TIMEOUT")
        if self._link_total_time or text is None:
            return float(self._link_total_time or CONNECT_TIMEOUT)
        if not (text.isdecimal() and 1 <= int(text) <= MAX_CONNECT_TIMEOUT):
            raise ParamInvalid(f"HCCL_CONNECT_TIMEOUT={text}: must be 1 to {MAX_CONNECT_TIMEOUT} whole seconds")
        return float(text)

    async def link(self, name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Meet all members; links are made from then on in the background. See ``LLMDataDist.link``."""
        if self._engine.relinker.is_on:
            logger.warning(
                "cluster %d: relink has no effect on links by rank table: all members must link() again",
                self._engine.cluster_id,
            )
        rank, ranks = validate(name, cluster_rank_info, rank_table, self._engine.cluster_id)
        seconds = self._seconds()
        if len(self._all) >= MAX_COMMUNICATORS:
            raise ParamInvalid(f"there are {len(self._all)} communicators, which is the limit: unlink one first")
        address = own_address(rank_table, rank)
        secret = secrets.token_hex(32)
        await self._engine.key_ring.look()
        listener = await self._engine.listen_for_members(address, partial(self._keys, secret))
        host, port = listener.address
        card = Card(cluster_id=self._engine.cluster_id, host=host, port=port, secret=secret)
        try:
            blobs = await meet(
                self._engine.device,
                name,
                rank,
                len(ranks),
                rank_table,
                card.model_dump_json().encode(),
                seconds,
                self._engine.transport.rdma,
            )
            cards = {other: self._read(blob, other, ranks) for other, blob in blobs.items()}
        except BaseException:
            self._engine.close_listener(listener)
            raise
        number = next(self._ids)
        group = self._all[number] = _RankGroup(listener)
        self._engine.spawn(lambda: self._link_all(group, rank, cards))
        return number

    @staticmethod
    def _read(blob: bytes, rank: int, ranks: dict[int, int]) -> Card:
        try:
            card = read_foreign(blob, Card, limit_bytes=MAX_CARD, limit_chars=MAX_CARD)
        except Unreadable as error:
            raise LinkError(f"rank {rank} sent a card that is not valid: {error}") from None
        if ranks.get(card.cluster_id) != rank:
            raise LinkError(
                f"rank {rank} says that it is cluster {card.cluster_id}, but cluster_rank_info says otherwise"
            )
        return card

    def _keys(self, server_secret: str) -> list[Key]:
        """Return the keys of the links for which a member listens.

        They combine the member's secret with the clusters' own keys. Without such keys, the secret is enough, because
        HCCL carried it. A user's key is not among them, because the members may be on several machines. Clusters with
        certificates prove these, and no key.
        """
        ring = self._engine.key_ring
        has_own = ring.are_given and ring.certificates() is None
        own = (ring.keys() if has_own else ()) or (None,)
        return [_MemberKey.of(bytes.fromhex(server_secret), key) for key in own]

    async def _link_all(self, group: _RankGroup, rank: int, cards: dict[int, Card]) -> None:
        status, seconds = RegisterMemStatus.FAILED, self._seconds()
        try:
            with group.making, anyio.fail_after(seconds):
                async with anyio.create_task_group() as tasks:
                    for other, card in cards.items():
                        tasks.start_soon(self._link_one, group, card, other < rank)
                status = RegisterMemStatus.OK
        except (TimeoutError, LLMException, ExceptionGroup) as error:
            why = _reason(error) or f"not all links were made within {seconds:g} s"
            logger.warning("cluster %d: a communicator failed: %s", self._engine.cluster_id, why)
        finally:
            group.status = status
            group.settled.set()

    async def _link_one(self, group: _RankGroup, card: Card, is_server: bool) -> None:
        if is_server:
            await self._connect(card)
        else:
            await self._engine.links.wait_linked(card.cluster_id)
        group.links[card.cluster_id] = self._engine.links.find(card.cluster_id)

    async def _connect(self, card: Card) -> None:
        try:
            address = (card.host, card.port)
            await self._engine.initiator.link(address, card.cluster_id, self._seconds(), self._keys(card.secret)[0])
        except LinkError as error:
            if error.status_code is LLMStatusCode.LLM_PROCESSING_LINK:  # another group has the same two members
                await self._engine.links.wait_linked(card.cluster_id)
            elif error.status_code is not LLMStatusCode.LLM_ALREADY_LINK:
                raise

    def status(self, comm_id: int) -> RegisterMemStatus:
        return self._find(comm_id).status

    async def wait_settled(self, comm_id: int) -> RegisterMemStatus:
        group = self._find(comm_id)
        await group.settled.wait()
        return group.status

    def _find(self, comm_id: int) -> _RankGroup:
        group = self._all.get(comm_id)
        if group is None:
            raise NotLinked(f"there is no communicator {comm_id}", hint="link() returns the number")
        return group

    async def unlink(self, comm_id: int) -> None:
        """End the links of a communicator, and forget it whatever the result."""
        group = self._find(comm_id)
        del self._all[comm_id]
        self._engine.close_listener(group.listener)
        # and waited for: a link that is made meanwhile would stay when the others end
        group.making.cancel()
        await group.settled.wait()
        for cluster_id, link in group.links.items():
            if link is self._engine.links.peek(cluster_id):  # otherwise it has been linked again since
                await self._unlink(cluster_id)

    async def _unlink(self, cluster_id: int) -> None:
        try:
            await self._engine.unlink(cluster_id, UNLINK, force=False)
        except LinkError as error:
            logger.warning("cluster %d: %s", self._engine.cluster_id, error)
            await self._engine.unlink(cluster_id, UNLINK, force=True)


def _reason(error: Exception) -> str:
    """Return the reasons of all links that were not made, in words; empty if the time was over."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(filter(None, map(_reason, error.exceptions)))
    return str(error)
