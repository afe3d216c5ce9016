"""The settings of an engine's transfers, as its user writes them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from aiodatadist._adapters.meaning import Meaning
from aiodatadist._adapters.peer_links import checked_host
from aiodatadist._adapters.peers import LOOPBACK, MAX_RULES, PeerRule, Peers, is_every_address, is_loopback
from aiodatadist._config.llm_config import LLMConfig, TransportName, use_key_file
from aiodatadist._config.option_rules import MAX_PATH
from aiodatadist._config.quotas import Quotas
from aiodatadist._config.secret_files import read_key
from aiodatadist._config.trust import Credential, TrustFolder, credential_of


class Settings(BaseModel):
    """A user's settings of transfers.

    Attributes:
        host: the address on which this worker listens, and on which peers reach it unless ``advertise_host`` is set.
        port: a free one if 0. A worker of rank r uses ``port + r``.
        advertise_host: the address or name on which peers reach this worker, if it is not ``host``: behind NAT, for a
            published port of a container, or if ``host`` is ``0.0.0.0`` or ``::``.
        advertise_port: the port on which peers reach rank 0, if it is not ``port``; rank r is reached on
            ``advertise_port + r``.
        trust: a folder with keys that all workers share, see :class:`~aiodatadist.LLMConfig`. Without it ``host`` must be
            a loopback address.
        auth_key_file: a file with one key, instead of ``trust``.
        peers: the peers that this engine dials: :class:`~aiodatadist._adapters.peers.PeerRule`, or their hosts. What a
            router carries is refused if it names another place. None: loopback addresses if ``host`` is one, otherwise
            no address.
        model_id: name of the model's weights, instead of the engine's own: for engines that have the same weights in
            different folders.
        accept_differences: names of properties that may differ from another engine's although they decide what the
            numbers mean: :data:`~aiodatadist._adapters.meaning.Meaning`.
        cluster_id: of rank 0; rank r has ``cluster_id + r``. If None it is random. Peers to which requests are pushed
            must be told it.
        device_id: the device of rank 0; rank r has ``device_id + r``.
        transport: see :class:`~aiodatadist.LLMConfig`.
        push: if true, graphs are cut at each layer, so that pushed requests travel layer by layer instead of step by
            step.
        lease_seconds: seconds for which finished blocks are kept for a peer to start. They begin again each time that the
            peer says that its request still waits.
        hold_seconds: seconds for which a peer can keep blocks like that, from when they are finished.
        max_takers: most requests of peers that a router may let take a finished request's blocks.
        pull_seconds: time limit for the arrival of one request's blocks, waiting included. This end keeps blocks no
            longer than that for a pull that has started, whatever the peer's setting is.
        link_seconds: time limit for linking to a peer.
        patience_seconds: seconds in which a peer may learn of its own finished request. One end of a pushed request
            waits as long for the other if that may have given the request up.
        max_offer_workers: most workers that a router's message may name.
        max_leased: the share of the KV cache's blocks that may be kept for peers at a time. Further requests are
            answered without an offer.
        max_leased_per_client: the share that may be kept for one client, if the engine knows who sent a request. If
            None, only ``max_leased`` applies. A client that chooses its own name evades this limit, but not
            ``max_leased``.
        max_awaited: the share of the KV cache's blocks that requests may have while they wait for another engine. Further
            requests are computed here.
        sync_kv_timeout: milliseconds for one transfer, once it runs.
        heartbeat_interval, heartbeat_misses, transfer_checksum, quotas: see :class:`~aiodatadist.LLMConfig`.
    """

    # model_id: pydantic before 2.10 keeps names that begin with model_ for itself, and warns.
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise_host: Annotated[str, Field(min_length=1, max_length=253), AfterValidator(checked_host)] | None = None
    advertise_port: int | None = Field(default=None, ge=1, le=65535)
    trust: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | None = None
    auth_key_file: Path | None = None
    peers: Annotated[tuple[PeerRule, ...], Field(max_length=MAX_RULES)] | None = None
    model_id: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    accept_differences: tuple[Meaning, ...] = ()
    cluster_id: int | None = Field(default=None, ge=0, lt=2**62)
    device_id: int = Field(default=0, ge=0)
    transport: TransportName = "auto"
    push: bool = False
    lease_seconds: float = Field(default=60.0, gt=0, le=86_400)
    hold_seconds: float = Field(default=600.0, ge=0, le=86_400)
    max_takers: int = Field(default=16, ge=1, le=64)
    pull_seconds: float = Field(default=60.0, gt=0, le=86_400)
    link_seconds: float = Field(default=10.0, gt=0, le=3600)
    patience_seconds: float = Field(default=5.0, ge=0, le=3600)
    max_offer_workers: int = Field(default=64, ge=1, le=1024)
    max_leased: float = Field(default=0.5, ge=0, le=1)
    max_leased_per_client: float | None = Field(default=None, ge=0, le=1)
    max_awaited: float = Field(default=0.5, ge=0, le=1)
    sync_kv_timeout: int = Field(default=10_000, ge=1)
    heartbeat_interval: float = 2.0
    heartbeat_misses: int = 3
    transfer_checksum: bool = False
    quotas: Quotas | None = None

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.advertise_host is not None and is_every_address(self.advertise_host):
            raise ValueError(
                f"advertise_host is {self.advertise_host!r}: must be one address, and not all of a machine"
            )
        if self.advertise_host is None and is_every_address(self.host):
            raise ValueError(
                f"host is {self.host!r}, which stands for all addresses of this machine: peers cannot dial it; set "
                "advertise_host to the address on which they reach this engine, or host to one address"
            )
        if self.advertise_port is not None and not self.port:
            raise ValueError(
                f"advertise_port is {self.advertise_port} and port is 0, any free port: set port to the port that "
                "is forwarded"
            )
        return self

    def moved(self, first: int, first_device: int) -> Self:
        """Return the settings of an engine whose rank 0 is number ``first`` among the workers that share them.

        Ports and cluster ids are counted from the first worker of all, devices from the first one of this machine.

        Raises:
            ValueError: if there is no such port or cluster id.
        """
        moved = {"device_id": self.device_id + first_device}
        for name, rule in (("port", 65535), ("advertise_port", 65535), ("cluster_id", 2**62 - 1)):
            base = getattr(self, name)
            if base and base + first > rule:
                raise ValueError(f"{name} is {base}: worker {first} would have {base + first}; the limit is {rule}")
            if base is not None and not (name == "port" and base == 0):
                moved[name] = base + first
        return self.model_copy(update=moved)

    def address(self, rank: int, port: int) -> tuple[str, int]:
        """Return the host and port on which peers reach the worker of this rank, which listens on ``port``."""
        return self.advertise_host or self.host, port if self.advertise_port is None else self.advertise_port + rank

    def own_cluster_id(self, rank: int) -> int:
        """Return the cluster id of the worker of this rank."""
        return secrets.randbits(62) if self.cluster_id is None else self.cluster_id + rank

    def allowed_peers(self) -> Peers:
        """Return the peers that this engine dials."""
        if self.peers is not None:
            return Peers(self.peers)
        return Peers(() if self.lacks_peers else LOOPBACK)

    @property
    def lacks_peers(self) -> bool:
        """True if this engine dials no other because ``peers`` is not set."""
        return self.peers is None and not is_loopback(self.host)

    @property
    def have_key(self) -> bool:
        """True if the workers have a key of their own, beside the user's."""
        return self.auth_key_file is not None or isinstance(credential_of(self.trust, None), TrustFolder)

    def credential(self) -> Credential:
        """Return the keys with which workers prove themselves to each other: those of their links.

        Raises ParamInvalid if the key file cannot be read, or others may read or write it.
        """
        file = self.auth_key_file
        key = None if file is None else read_key(file, "auth_key_file")
        return credential_of(self.trust, key, auth_key_file=file)

    def config(self, rank: int) -> LLMConfig:
        """Return the configuration of the worker of this rank.

        Raises ParamInvalid if an option is wrong, or others may read or write the key file.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        config = LLMConfig(
            device_id=self.device_id + rank,
            listen_ip_info=f"{host}:{self.port + rank if self.port else 0}",
            trust=self.trust,
            sync_kv_timeout=self.sync_kv_timeout,
            transport=self.transport,
            heartbeat_interval=self.heartbeat_interval,
            heartbeat_misses=self.heartbeat_misses,
            transfer_checksum=self.transfer_checksum,
            quotas=self.quotas,
        )
        if self.auth_key_file is not None:
            use_key_file(config, self.auth_key_file, "auth_key_file")
        return config
