"""Configuration: keyword arguments on one side, LLM-DataDist's option dictionary on the other."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from ssl import SSLContext
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretBytes, ValidationError

from aiodatadist._config import option_rules as rules
from aiodatadist._config.certificates import Contexts
from aiodatadist._config.option_rules import PoolConfig, bounded, optional
from aiodatadist._config.plain_networks import PlainNetworks, joined_networks
from aiodatadist._config.quotas import Quotas
from aiodatadist._config.relink_policy import RelinkPolicy
from aiodatadist._config.secret_files import read_key
from aiodatadist._config.trust import Credential, credential_of
from aiodatadist._values import checks, peer_budget
from aiodatadist._values.addresses import parse_address
from aiodatadist._values.signatures import readable
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

__all__ = ["LLMConfig", "PoolConfig", "Quotas", "RelinkPolicy", "TransportName"]

DEFAULT_SYNC_KV_TIMEOUT = 1000
DEFAULT_MEM_UTILIZATION = 0.95
DEFAULT_HEARTBEAT_INTERVAL = 2.0
DEFAULT_HEARTBEAT_MISSES = 3
DEFAULT_TCP_STREAMS = 4
DEFAULT_TCP_THREADS = 2

TransportName = Literal["auto", "hccl", "loopback", "tcp"]


class _Unset:
    """The default of ``device_id``: device 0, unless ``ge_options`` names another."""

    def __repr__(self) -> str:
        return "0"


_UNSET: Final[Any] = _Unset()


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn pydantic's report of several lines into the ValueError behind it."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "no_such_attribute":
            raise ValueError(f"LLMConfig has no option {problem['loc'][0]!r}") from None
        raise ValueError(str(problem.get("ctx", {}).get("error", problem["msg"]))) from None


@readable
class LLMConfig(BaseModel):
    """The options of a :class:`~aiodatadist.LLMDataDist`. Each can be given to the constructor or set later.

    A wrong type raises ``TypeError``, a broken rule ``LLMException(LLM_PARAM_INVALID)``. An integer outside the C type
    raises ``ValueError``, and so does setting a name that is not an option. After an error nothing has changed. None
    means "not set" wherever it is the default; so does an empty text, except for ``local_comm_res``.

    Attributes:
        device_id: the device of this cluster. A list is kept, and refused by ``init`` if it has several.
        listen_ip_info: ``"ip:port"`` to listen on for peers that link to this cluster; port 0 is any free one. A host
            name may stand for its address. ``init`` then looks it up, and takes the first IPv4 address, or else the
            first address. Its other name is ``listen``.
        sync_kv_timeout: milliseconds for one transfer, counted from when it begins to run. Below 50, ``init`` logs a
            warning, because then seconds were probably meant.
        enable_cache_manager, enable_remote_cache_accessible: the mode. Both are on by default.
        link_total_time: seconds for a link by rank table; 0 means ``HCCL_CONNECT_TIMEOUT``, or else 120.
        link_retry_count: attempts within that time.
        local_comm_res: this device in a rank table, as JSON of version 1.0, or 1.2 (A3). If it is not set, or has
            version 1.3, the table is generated from this machine's address, the physical device id, and the address of
            the device's network card as ``/etc/hccn.conf`` or ``hccn_tool`` knows it. softnpu has its own addresses.
        mem_pool_cfg, host_mem_pool_cfg: memory for allocated caches on the device and on the host: ``memory_size`` in
            bytes and ``page_shift``, as JSON, a dict or a :class:`PoolConfig`; kept as JSON.
        rdma_traffic_class: of HCCL's communicators, 0 to 255, a multiple of 4. None means ``HCCL_RDMA_TC``, or else
            132.
        rdma_service_level: of HCCL's communicators, 0 to 7. None means ``HCCL_RDMA_SL``, or else 4. In both options any
            other uint32 is kept but counts as None, and ``init`` logs a warning.
        ge_options: further options of the engine; their keys begin with ``ge.`` or ``llm.``. A device named here
            becomes ``device_id``, unless that was set. ``ge.flowGraphMemMaxSize`` is the KvCacheManager mode's pool.
            Other entries have no effect, and ``init`` logs a warning that names them. Entries that stand for an
            attribute count as its value in :meth:`generate_options`, unless the attribute was changed.
        enable_switch_role, mem_utilization, buf_pool_cfg: for the KvCacheManager mode. They are checked and kept, and
            have no effect in the other mode. ``mem_utilization`` is a share in [0, 1], ``buf_pool_cfg`` JSON or a dict.
        transfer_backend: with ``"hixl"`` a link belongs to its initiator, see :meth:`LLMDataDist.link_clusters`. It
            needs ``listen_ip_info`` and both modes on. Bytes still travel as ``transport`` says: there is no HIXL
            engine.
        global_resource_config, deploy_res_path, cluster_info, output_max_size: a vendor's script may give them. They
            are checked and kept, but have no effect, and ``init`` logs a warning with the reason.
            ``global_resource_config`` must be JSON by the time of ``init``. Addresses in ``cluster_info`` are kept as
            integers.
        transport: how bytes travel: ``"hccl"``; ``"tcp"``, for HOST memory and softnpu's between any machines;
            ``"auto"``, which is HCCL where it reaches the peer, otherwise TCP, if both ends prove a key or a certificate;
            or ``"loopback"`` inside one process. It must be the same at both ends, apart from ``"auto"`` at one of them,
            which follows ``"hccl"`` and ``"tcp"``.
        tcp_streams: connections for bytes of one link over TCP, 1 to 32. The smaller of both ends' numbers
            applies. More of them help on networks that lose packets, or with long ways.
        tcp_threads: threads of this process that move bytes over these connections, 1 to 16. The first cluster's number
            applies to all clusters of the process.
        tcp_plain_networks: networks on which bytes of these connections travel without seals, as ``"10.1.0.0/16"``, joined
            by commas, if both ends say so of the other's address. None: nowhere, as long as there is a key or a certificate.
        heartbeat_interval: seconds between two signs of life that this end sends on a link, 0.01 to 600. The peer is
            told this interval and waits for the signs. How soon this end notices a silent peer is therefore the peer's
            setting, so set it at both ends. Below 0.5, ``init`` logs a warning that busy machines may end links, unless
            the allowed misses give a peer at least 2 s.
        heartbeat_misses: a peer that misses this number of its own heartbeats in a row, 1 to 100, is lost.
        relink: when a broken link that this end's ``link_clusters`` made is re-established, as JSON, a dict or a
            :class:`RelinkPolicy`; kept as JSON. None: never, as upstream. ``"{}"``: with the policy's defaults.
        transfer_checksum: True to compare what arrives with what was sent, in every pull and push that this cluster
            starts, unless the call says otherwise; see ``docs/checksums.md``. A peer that is too old for that is not
            linked.
        quotas: how much one peer, or one stranger, may use of this cluster, as JSON, a dict or a :class:`Quotas`; kept
            as JSON. None, and limits that are not given: the defaults of :class:`Quotas`.
        trust: a folder with the keys that both ends must prove, in a file ``keys`` with lines of ``name secret``, as
            ``SECURITY.md`` describes it; or with certificates, in ``tls.crt``, ``tls.key`` and ``ca.crt``, as
            ``docs/certificates.md`` does. Instead of that folder it can be a pair of ``ssl.SSLContext``: of
            ``PROTOCOL_TLS_CLIENT`` for links that this cluster asks for, of ``PROTOCOL_TLS_SERVER`` for those that it
            is asked for. No option dictionary and no pickle contains them. If neither ``trust`` nor ``auth_key`` is
            set, ``AIODATADIST_TRUST`` counts; if that is not set either, the cluster links on loopback addresses only,
            and only to processes of the same user, which share that user's key. ``"none"``: on loopback, any user's
            process may link; ``init`` logs a warning.
        auth_key: a secret that both ends must prove, instead of ``trust``. Beyond loopback addresses it must have at
            least 16 bytes. No option dictionary and no pickle contains it.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        validate_assignment=True, extra="forbid", arbitrary_types_allowed=True
    )

    device_id: Annotated[int | list[int], BeforeValidator(rules.device_id)] = 0
    listen_ip_info: Annotated[str | None, optional(rules.text("listen_ip_info"))] = None
    sync_kv_timeout: Annotated[int, BeforeValidator(rules.milliseconds)] = DEFAULT_SYNC_KV_TIMEOUT
    enable_cache_manager: Annotated[bool, rules.flag("enable_cache_manager")] = True
    enable_remote_cache_accessible: Annotated[bool, rules.flag("enable_remote_cache_accessible")] = True
    link_total_time: Annotated[int, BeforeValidator(bounded("link_total_time", 0, 2**32 - 1))] = 0
    link_retry_count: Annotated[int, BeforeValidator(bounded("link_retry_count", 1, 100))] = 1
    local_comm_res: Annotated[str | None, optional(rules.local_comm_res)] = None
    mem_pool_cfg: Annotated[str | None, optional(rules.shaped("mem_pool_cfg", PoolConfig))] = None
    host_mem_pool_cfg: Annotated[str | None, optional(rules.shaped("host_mem_pool_cfg", PoolConfig))] = None
    rdma_traffic_class: Annotated[int | None, optional(rules.uint32("rdma_traffic_class"))] = None
    rdma_service_level: Annotated[int | None, optional(rules.uint32("rdma_service_level"))] = None
    transfer_backend: Annotated[Literal["hixl"] | None, optional(rules.choice("transfer_backend", "hixl"))] = None
    global_resource_config: Annotated[str | None, optional(rules.kept("global_resource_config"))] = None
    ge_options: Annotated[dict[str, str], BeforeValidator(rules.ge_options)] = Field(default_factory=dict)
    enable_switch_role: Annotated[bool, rules.flag("enable_switch_role")] = False
    mem_utilization: Annotated[float, BeforeValidator(rules.share("mem_utilization"))] = DEFAULT_MEM_UTILIZATION
    buf_pool_cfg: Annotated[str | None, optional(rules.shaped("buf_pool_cfg", rules.BufferPoolConfig))] = None
    deploy_res_path: Annotated[str | None, optional(rules.text("deploy_res_path"))] = None
    cluster_info: Annotated[str | None, optional(rules.cluster_info)] = None
    output_max_size: Annotated[int | None, optional(bounded("output_max_size", 0, 2**63 - 1))] = None
    transport: Annotated[TransportName, BeforeValidator(rules.choice("transport", *get_args(TransportName)))] = "auto"
    tcp_streams: Annotated[int, BeforeValidator(bounded("tcp_streams", 1, peer_budget.MAX_STREAMS))] = (
        DEFAULT_TCP_STREAMS
    )
    tcp_threads: Annotated[int, BeforeValidator(bounded("tcp_threads", 1, 16))] = DEFAULT_TCP_THREADS
    tcp_plain_networks: Annotated[str | None, optional(joined_networks)] = None
    heartbeat_interval: Annotated[float, BeforeValidator(rules.heartbeat_interval)] = DEFAULT_HEARTBEAT_INTERVAL
    heartbeat_misses: Annotated[int, BeforeValidator(bounded("heartbeat_misses", 1, 100))] = DEFAULT_HEARTBEAT_MISSES
    relink: Annotated[str | None, optional(rules.shaped("relink", RelinkPolicy))] = None
    transfer_checksum: Annotated[bool, rules.flag("transfer_checksum")] = False
    quotas: Annotated[str | None, optional(rules.shaped("quotas", Quotas))] = None
    trust: Annotated[str | Contexts | None, optional(rules.trust)] = None
    auth_key: Annotated[SecretBytes | None, BeforeValidator(rules.secret)] = None

    def __init__(  # spelt out for type checkers: callers may pass more types than are kept
        self,
        *,
        device_id: int | Sequence[int] = _UNSET,  # 0, but then ge_options may name another
        listen_ip_info: str | None = None,
        listen: str | None = None,
        sync_kv_timeout: int | str = DEFAULT_SYNC_KV_TIMEOUT,
        enable_cache_manager: bool = True,
        enable_remote_cache_accessible: bool = True,
        link_total_time: int = 0,
        link_retry_count: int = 1,
        local_comm_res: str | None = None,
        mem_pool_cfg: str | Mapping[str, int | str] | PoolConfig | None = None,
        host_mem_pool_cfg: str | Mapping[str, int | str] | PoolConfig | None = None,
        rdma_traffic_class: int | None = None,
        rdma_service_level: int | None = None,
        transfer_backend: Literal["hixl"] | None = None,
        global_resource_config: str | None = None,
        ge_options: Mapping[str, str] | None = None,
        enable_switch_role: bool = False,
        mem_utilization: float = DEFAULT_MEM_UTILIZATION,
        buf_pool_cfg: str | Mapping[str, Any] | rules.BufferPoolConfig | None = None,
        deploy_res_path: str | None = None,
        cluster_info: str | None = None,
        output_max_size: int | None = None,
        transport: TransportName = "auto",
        tcp_streams: int = DEFAULT_TCP_STREAMS,
        tcp_threads: int = DEFAULT_TCP_THREADS,
        tcp_plain_networks: str | None = None,
        heartbeat_interval: float = DEFAULT_HEARTBEAT_INTERVAL,
        heartbeat_misses: int = DEFAULT_HEARTBEAT_MISSES,
        relink: str | Mapping[str, float | None] | RelinkPolicy | None = None,
        transfer_checksum: bool = False,
        quotas: str | Mapping[str, float] | Quotas | None = None,
        trust: str | PathLike[str] | tuple[SSLContext, SSLContext] | Contexts | None = None,
        auth_key: bytes | str | SecretBytes | None = None,
    ) -> None:
        if listen is not None and listen_ip_info is not None:
            raise ParamInvalid("listen and listen_ip_info are the same option: give one of them")
        given = {name: value for name, value in locals().items() if name in LLMConfig.model_fields}
        given["listen_ip_info"] = listen_ip_info if listen is None else listen
        if device_id is _UNSET:
            del given["device_id"]
        with _one_sentence():
            super().__init__(**given)
        self._adopt_device()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "ge_options":  # checked completely before anything changes
            rules.take_device(rules.ge_options(value))
        with _one_sentence():
            super().__setattr__(name, value)
        if name == "ge_options":
            self._adopt_device()

    def _adopt_device(self) -> None:
        """Move a device in ``ge_options`` to ``device_id``, unless that was set: what is explicit wins."""
        device = rules.take_device(self.ge_options)
        if device is not None and "device_id" not in self.model_fields_set:
            self.__dict__["device_id"] = (
                device  # past __setattr__: not marked as set, so the next ge_options can replace it
            )

    @property
    def listen(self) -> str | None:
        """Another name of ``listen_ip_info``."""
        return self.listen_ip_info

    @listen.setter
    def listen(self, value: str | None) -> None:
        self.listen_ip_info = value

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """The address and port to listen on, or a name and port if the name was not looked up yet; None if not set.

        Raises:
            ParamInvalid: if ``listen_ip_info`` is not an address, or a network address without a key.
        """
        if not self.listen_ip_info:
            return None
        host, port = parse_address(self.listen_ip_info, "listen_ip_info")
        with suppress(ValueError):  # a host name
            check_listening_on(self, ipaddress.ip_address(host))
        return host, port

    def __getstate__(self) -> dict[Any, Any]:
        """Return what a pickle contains. Raises TypeError if there is an ``auth_key``, which must be in no file."""
        if self.auth_key is not None:
            raise TypeError(
                "an LLMConfig with auth_key cannot be pickled: the key would be in the pickle. Give the other process a "
                "folder: LLMConfig(trust=...)"
            )
        return super().__getstate__()

    @property
    def device(self) -> int:
        """The only device. Raises ParamInvalid if there are several."""
        return rules.one_device(self.device_id)

    @property
    def relink_policy(self) -> RelinkPolicy | None:
        """The parsed ``relink``; None if broken links are not re-established."""
        return None if self.relink is None else RelinkPolicy.parse(self.relink, "relink")

    @property
    def peer_quotas(self) -> Quotas:
        """The parsed ``quotas``, with defaults for the limits that are not given."""
        return Quotas() if self.quotas is None else Quotas.parse(self.quotas, "quotas")

    @property
    def plain_networks(self) -> PlainNetworks:
        """The parsed ``tcp_plain_networks``."""
        return PlainNetworks.parse(self.tcp_plain_networks or "", "tcp_plain_networks")

    @property
    def links_have_owners(self) -> bool:
        """True if a link belongs to its initiator, as with HIXL, instead of to both ends."""
        return self.transfer_backend == "hixl"

    @property
    def options(self) -> dict[str, str]:
        """The option dictionary of :meth:`generate_options`."""
        return self.generate_options()

    def gen_options(self) -> dict[str, str]:
        """Return the dictionary of :meth:`generate_options`, under its older name."""
        return self.generate_options()

    def generate_options(self) -> dict[str, str]:
        """Return the option dictionary that ``LLMDataDist.init`` takes; a fresh one each time.

        Entries of ``ge_options`` come first, and an attribute that was changed overrides them. Options that are not set
        are left out. Options that only this library knows, or that the KvCacheManager mode may switch on, are left out
        at their default. ``auth_key`` is never included.
        """
        entries = dict(self.ge_options)
        given = {_BY_KEY[key.lower()].field: key for key in entries if key.lower() in _BY_KEY}
        for option in _OPTIONS:
            value = getattr(self, option.field)
            is_default = value == type(self).model_fields[option.field].default
            if (
                value is None
                or isinstance(value, Contexts)
                or (is_default and (option.is_quiet or option.field in given))
            ):
                continue
            entries.pop(given.get(option.field, ""), None)
            entries[option.key] = option.kind.write(value)
        return entries

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Return the configuration behind an option dictionary; keys are compared without case.

        Absent options have their defaults, so with ``llm.LocalCommRes`` and ``llm.TransferBackend`` both modes are on
        unless they were switched off. Other keys of ``ge.`` and ``llm.`` go to ``ge_options``.

        Raises:
            TypeError: if it is not a dictionary of strings.
            ValueError: if an integer is outside its C type.
            ParamInvalid: if an option is unknown or given twice, a value breaks its rule, or options do not go
                together.
        """
        if not isinstance(options, Mapping):
            raise TypeError(f"options is a {type(options).__name__}: must be a dict of str to str")
        rules.count_options(options, "options")
        values: dict[str, Any] = {}
        spelling: dict[str, str] = {}
        others: dict[str, str] = {}
        for key, text in options.items():
            checks.instance(key, "option", str)
            checks.instance(text, key, str)
            option = _BY_KEY.get(key.lower())
            if option is None:
                others[_engine_key(key)] = text
                continue
            value, first = option.read(key, text), spelling.setdefault(option.field, key)
            if first != key and not _agree(values[option.field], value):
                raise ParamInvalid(f"option {key!r} is {text!r}: {first!r} is the same option with another value")
            values[option.field] = value if first == key else max(values[option.field], value)
        config = cls(**values, ge_options=others)
        _check_combination(config)
        return config


# ---- what options ask of each other ----


def credential_for(config: LLMConfig) -> Credential:
    """Return the keys with which a cluster proves itself. Nothing has been read yet.

    Raises:
        ParamInvalid: if both ``trust`` and ``auth_key`` are set.
    """
    key = config.auth_key
    file = key.path if isinstance(key, _KeyOfFile) else None
    return credential_of(config.trust, None if key is None else key.get_secret_value(), auth_key_file=file)


class _KeyOfFile(SecretBytes):
    """A key, and the file that it was read from."""

    def __init__(self, secret: bytes, path: Path) -> None:
        super().__init__(secret)
        self.path: Path = path


def use_key_file(config: LLMConfig, path: Path, name: str) -> None:
    """Set the ``auth_key`` of a configuration to the content of a file. Its cluster reads the file again when it changes.

    Args:
        name: names the file in errors, in front of its path.

    Raises:
        ParamInvalid: if the file cannot be read, or others may read or write it.
    """
    config.auth_key = SecretBytes(read_key(path, name))
    config.__dict__["auth_key"] = _KeyOfFile(config.auth_key.get_secret_value(), path)


def check_listening_on(config: LLMConfig, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Raise ParamInvalid if this address needs a key that the cluster does not have.

    The address is ``listen_ip_info``, or what that host name stands for.
    """
    rule = credential_for(config).why_not(str(address))
    if not rule:
        return
    stands_for = "" if str(address) in str(config.listen_ip_info) else f", which is {address}"
    raise ParamInvalid(
        f"listen_ip_info is {config.listen_ip_info!r}{stands_for}: listening on a network {rule}",
        hint="give both ends the same folder LLMConfig(trust=...), or the same auth_key, or listen on 127.0.0.1",
    )


def check_mode(config: LLMConfig) -> None:
    """Refuse options that do not go together, and the mode that only ``aiodatadist.legacy`` has.

    Raises:
        ParamInvalid: if ``local_comm_res`` or ``transfer_backend`` is set with a mode off, or ``transfer_backend``
            without ``listen_ip_info``; if there are several devices; if the pool size is not a number; if
            ``global_resource_config`` is not JSON.
        FeatureNotEnabled: if ``enable_cache_manager`` is off.
    """
    _check_combination(config)
    if not config.enable_cache_manager:
        raise FeatureNotEnabled(
            "the KvCacheManager mode (llm.EnableCacheManager = 0) is not available here",
            hint="use aiodatadist.legacy.LLMDataDist, or switch enable_cache_manager on",
        )


def check_kept(config: LLMConfig) -> None:
    """Check the options that are kept as given, and refused only when a cluster uses them. Raises ParamInvalid."""
    rules.one_device(config.device_id)
    rules.pool_size(config.ge_options)
    if config.global_resource_config is not None:
        rules.load(config.global_resource_config, "global_resource_config")


def _check_combination(config: LLMConfig) -> None:
    check_kept(config)
    credential_for(config)
    if config.local_comm_res is not None and not config.enable_cache_manager:
        raise ParamInvalid("llm.EnableCacheManager is 0: with llm.LocalCommRes it must be 1, or absent")
    if config.transfer_backend is None:
        return
    for key, is_on in (
        ("llm.EnableCacheManager", config.enable_cache_manager),
        ("llm.EnableRemoteCacheAccessible", config.enable_remote_cache_accessible),
    ):
        if not is_on:
            raise ParamInvalid(f"{key} is 0: with llm.TransferBackend it must be 1")
    if not config.listen_ip_info:
        raise ParamInvalid("llm.listenIpInfo is not set: with llm.TransferBackend it must be given")


# ---- the option dictionary ----


class _Kind(NamedTuple):
    """The functions that read and write the values of an option. ``read`` raises ValueError if the text breaks ``rule``."""

    read: Callable[[str], object]
    write: Callable[[Any], str]
    rule: str


def _agree(one: object, other: object) -> bool:
    """Return True if both name the same devices, or one names only the first of the other's."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(a == b for a, b in zip(one, other, strict=False))
    return one == other


def _number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise ValueError(text)
    return int(text)


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError(text)
    return text == "1"


def _write_devices(value: int | Sequence[int]) -> str:
    return str(value) if isinstance(value, int) else ";".join(map(str, value))


_TEXT = _Kind(str, str, "text")
_DEVICE = _Kind(rules.read_devices, _write_devices, "a number, or several joined by ';'")
_FIRST_DEVICE = _Kind(rules.read_devices, lambda value: _write_devices(value).partition(";")[0], _DEVICE.rule)
_NUMBER = _Kind(_number, str, "a number")
_SHARE = _Kind(float, repr, "a number with a decimal point")
_SECONDS = _Kind(float, repr, "a number of seconds")
_SWITCH = _Kind(_switch, lambda value: str(int(value)), "'0' or '1'")


class _Option(NamedTuple):
    """An entry of the dictionary, and the attribute it stands for.

    If ``is_quiet``, the entry is not written at its default.
    """

    key: str
    field: str
    kind: _Kind = _TEXT
    is_quiet: bool = False

    def read(self, key: str, text: str) -> object:
        """Return the value that ``text`` stands for. ``key`` is the option as the caller spelt it.

        Raises:
            ParamInvalid: if the text is not of this kind.
        """
        try:
            return self.kind.read(text)
        except ValueError:
            raise ParamInvalid(f"option {key!r} is {text!r}: must be {self.kind.rule}") from None


_OPTIONS: Final = (
    _Option("ge.exec.deviceId", "device_id", _DEVICE),
    _Option("ge.session_device_id", "device_id", _FIRST_DEVICE),
    _Option("llm.listenIpInfo", "listen_ip_info"),
    _Option("llm.SyncKvCacheWaitTime", "sync_kv_timeout"),  # as text: its own rule is about digits
    _Option("llm.EnableCacheManager", "enable_cache_manager", _SWITCH),
    _Option("llm.EnableRemoteCacheAccessible", "enable_remote_cache_accessible", _SWITCH),
    _Option("llm.LinkTotalTime", "link_total_time", _NUMBER),
    _Option("llm.LinkRetryCount", "link_retry_count", _NUMBER),
    _Option("llm.LocalCommRes", "local_comm_res"),
    _Option("llm.MemPoolConfig", "mem_pool_cfg"),
    _Option("llm.HostMemPoolConfig", "host_mem_pool_cfg"),
    _Option("llm.RdmaTrafficClass", "rdma_traffic_class", _NUMBER),
    _Option("llm.RdmaServiceLevel", "rdma_service_level", _NUMBER),
    _Option("llm.TransferBackend", "transfer_backend"),
    _Option("llm.GlobalResourceConfig", "global_resource_config"),
    _Option("llm.EnableSwitchRole", "enable_switch_role", _SWITCH, is_quiet=True),
    _Option("llm.MemoryUtilization", "mem_utilization", _SHARE),
    _Option("llm.BufPoolCfg", "buf_pool_cfg"),
    _Option("llm.deployResPath", "deploy_res_path"),
    _Option("llm.ClusterInfo", "cluster_info"),
    _Option("llm.OutputMaxSize", "output_max_size", _NUMBER),
    _Option("aiodatadist.Transport", "transport", is_quiet=True),
    _Option("aiodatadist.TcpStreams", "tcp_streams", _NUMBER, is_quiet=True),
    _Option("aiodatadist.TcpThreads", "tcp_threads", _NUMBER, is_quiet=True),
    _Option("aiodatadist.TcpPlainNetworks", "tcp_plain_networks", is_quiet=True),
    _Option("aiodatadist.HeartbeatInterval", "heartbeat_interval", _SECONDS, is_quiet=True),
    _Option("aiodatadist.HeartbeatMisses", "heartbeat_misses", _NUMBER, is_quiet=True),
    _Option("aiodatadist.Relink", "relink", is_quiet=True),
    _Option("aiodatadist.TransferChecksum", "transfer_checksum", _SWITCH, is_quiet=True),
    _Option("aiodatadist.Quotas", "quotas", is_quiet=True),
    _Option("aiodatadist.Trust", "trust"),
)

_BY_KEY: Final = {option.key.lower(): option for option in (*_OPTIONS, _Option("llm.DeviceId", "device_id", _DEVICE))}


def field_of(key: str) -> str | None:
    """Return the option that has this key in a dictionary, in any spelling of case; None if none has."""
    option = _BY_KEY.get(key.lower())
    return None if option is None else option.field


def _engine_key(key: str) -> str:
    """Return a key that stands for no attribute, because it is the vendor's own.

    Raises:
        ParamInvalid: if it does not begin as the vendor's keys do.
    """
    if not key.lower().startswith(rules.VENDORS):
        known = ", ".join(sorted(option.key for option in _BY_KEY.values()))
        raise ParamInvalid(
            f"option {key!r} is not known", hint=f"known are {known}, and all that begin with 'ge.' or 'llm.'"
        )
    return key
