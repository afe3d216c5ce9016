"""Configuration: keyword arguments on one side, LLM-DataDist's option dictionary on the other."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretBytes

from aiodatadist import checks
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

DEFAULT_SYNC_KV_TIMEOUT = 1000
DEFAULT_LINK_TOTAL_TIME = 120
MAX_LOCAL_COMM_RES = 64 << 10

TransportName = Literal["hccl", "loopback"]


def _device_id(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        checks.sequence(value, "device_id", int)
        if len(value) != 1:
            raise ParamInvalid(f"device_id is {value}: exactly one device belongs to a process")
        value = value[0]
    if checks.integer(value, "device_id", checks.INT32) < 0:
        raise ParamInvalid(f"device_id is {value}: it has to be at least 0")
    return int(value)


def _milliseconds(value: Any) -> int:
    if isinstance(value, str):
        if not value.isdecimal():
            raise ParamInvalid(f"sync_kv_timeout is {value!r}: it has to be digits, in milliseconds")
        value = int(value)
    if checks.integer(value, "sync_kv_timeout", checks.INT32) <= 0:
        raise ParamInvalid(f"sync_kv_timeout is {value}: it has to be above 0 milliseconds")
    return int(value)


def _bounded(name: str, low: int, high: int) -> BeforeValidator:
    def check(value: Any) -> int:
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: it has to be an int")
        if not low <= value <= high:
            raise ParamInvalid(f"{name} is {value}: it has to be in [{low}, {high}]")
        return value

    return BeforeValidator(check)


def _text(value: Any) -> str | None:
    return None if value is None else checks.instance(value, "listen_ip_info", str)


def _flag(name: str) -> BeforeValidator:
    return BeforeValidator(lambda value: checks.instance(value, name, bool))


def _resource(value: Any) -> str | None:
    if value is None:
        return None
    text = checks.instance(value, "local_comm_res", str)
    if len(text) > MAX_LOCAL_COMM_RES:
        raise ParamInvalid(f"local_comm_res has {len(text)} characters: the limit is {MAX_LOCAL_COMM_RES}")
    if text:
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParamInvalid(f"local_comm_res is not JSON: {error}") from None
    return text


def _transport(value: Any) -> str:
    name = checks.instance(value, "transport", str)
    if name not in get_args(TransportName):
        raise ParamInvalid(f"transport is {name!r}: there are {', '.join(get_args(TransportName))}")
    return name


def _secret(value: Any) -> SecretBytes | None:
    """The messages never show the value."""
    if value is None or isinstance(value, SecretBytes):
        secret = value
    elif isinstance(value, (bytes, str)):
        secret = SecretBytes(value.encode() if isinstance(value, str) else value)
    else:
        raise TypeError(f"auth_key is of type {type(value).__name__}: it has to be bytes or str")
    if secret is not None and not secret.get_secret_value():
        raise ParamInvalid("auth_key is empty: a key has at least 1 byte; without authentication it is None")
    return secret


def parse_address(text: str, name: str) -> tuple[str, int]:
    """``"ip:port"``, or ``"[ipv6]:port"``; port 0 is any free one.

    Raises:
        ParamInvalid: it is neither.
    """
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    try:
        is_address = ipaddress.ip_address(host).version == (6 if in_brackets else 4)
    except ValueError:
        is_address = False
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) in checks.UINT16
    if not is_address or not is_port:
        raise ParamInvalid(f"{name} is {text!r}: it has to be ip:port or [ipv6]:port with a port in [0, 65535]")
    return host, int(port)


class LLMConfig(BaseModel):
    """Options of a :class:`~aiodatadist.LLMDataDist`. Each may be given to the constructor or set later.

    Wrong types raise ``TypeError``, broken rules ``LLMException(LLM_PARAM_INVALID)``, integers outside the C type
    ``ValueError``; nothing is changed then.

    Attributes:
        device_id: the device of this cluster.
        listen_ip_info: ``"ip:port"`` to listen on for peers that link to us; port 0 takes any free one. Also ``listen``.
        sync_kv_timeout: milliseconds for one transfer, counted from when it begins to run.
        enable_cache_manager, enable_remote_cache_accessible: the mode. Both on unless said otherwise.
        link_total_time: seconds for setting up a channel where a call has no timeout of its own.
        link_retry_count: attempts within that time.
        local_comm_res: this device in a rank table, as JSON; needed on an NPU, ignored by softnpu.
        transport: how bytes travel: ``"hccl"``, or ``"loopback"`` inside one process.
        auth_key: secret that both ends prove to have. Needed for listening on anything but loopback addresses.
    """

    model_config = ConfigDict(validate_assignment=True, extra="forbid")

    device_id: Annotated[int, BeforeValidator(_device_id)] = 0
    listen_ip_info: Annotated[str | None, BeforeValidator(_text)] = None
    sync_kv_timeout: Annotated[int, BeforeValidator(_milliseconds)] = DEFAULT_SYNC_KV_TIMEOUT
    enable_cache_manager: Annotated[bool, _flag("enable_cache_manager")] = True
    enable_remote_cache_accessible: Annotated[bool, _flag("enable_remote_cache_accessible")] = True
    link_total_time: Annotated[int, _bounded("link_total_time", 0, 2**32 - 1)] = 0
    link_retry_count: Annotated[int, _bounded("link_retry_count", 1, 100)] = 1
    local_comm_res: Annotated[str | None, BeforeValidator(_resource)] = None
    transport: Annotated[TransportName, BeforeValidator(_transport)] = "hccl"
    auth_key: Annotated[SecretBytes | None, BeforeValidator(_secret)] = None

    def __init__(  # spelt out for type checkers: options may be given as more types than they are kept in
        self,
        *,
        device_id: int | Sequence[int] = 0,
        listen_ip_info: str | None = None,
        listen: str | None = None,
        sync_kv_timeout: int | str = DEFAULT_SYNC_KV_TIMEOUT,
        enable_cache_manager: bool = True,
        enable_remote_cache_accessible: bool = True,
        link_total_time: int = 0,
        link_retry_count: int = 1,
        local_comm_res: str | None = None,
        transport: TransportName = "hccl",
        auth_key: bytes | str | SecretBytes | None = None,
    ) -> None:
        if listen is not None and listen_ip_info is not None:
            raise ParamInvalid("listen and listen_ip_info are the same option: give one of them")
        super().__init__(
            device_id=device_id,
            listen_ip_info=listen_ip_info if listen is None else listen,
            sync_kv_timeout=sync_kv_timeout,
            enable_cache_manager=enable_cache_manager,
            enable_remote_cache_accessible=enable_remote_cache_accessible,
            link_total_time=link_total_time,
            link_retry_count=link_retry_count,
            local_comm_res=local_comm_res,
            transport=transport,
            auth_key=auth_key,
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
        """Where to listen.

        Raises:
            ParamInvalid: ``listen_ip_info`` is not an address, or a network address without ``auth_key``.
        """
        if not self.listen_ip_info:
            return None
        host, port = parse_address(self.listen_ip_info, "listen_ip_info")
        if not ipaddress.ip_address(host).is_loopback and self.auth_key is None:
            raise ParamInvalid(
                f"listen_ip_info is {self.listen_ip_info!r}: listening on a network needs auth_key",
                hint="give both ends the same LLMConfig(auth_key=...), or listen on 127.0.0.1",
            )
        return host, port

    def check_mode(self) -> None:
        """Refuse the modes that are not there yet."""
        if not self.enable_cache_manager:
            raise FeatureNotEnabled("the KvCacheManager mode (llm.EnableCacheManager = 0) is not available")
        if not self.enable_remote_cache_accessible:
            raise FeatureNotEnabled("the request/response mode (llm.EnableRemoteCacheAccessible = 0) is not available")

    def generate_options(self) -> dict[str, str]:
        """The option dictionary that ``LLMDataDist.init`` takes; a fresh one each time."""
        options = {
            "ge.exec.deviceId": str(self.device_id),
            "llm.SyncKvCacheWaitTime": str(self.sync_kv_timeout),
            "llm.EnableCacheManager": str(int(self.enable_cache_manager)),
            "llm.EnableRemoteCacheAccessible": str(int(self.enable_remote_cache_accessible)),
            "llm.LinkTotalTime": str(self.link_total_time),
            "llm.LinkRetryCount": str(self.link_retry_count),
        }
        if self.listen_ip_info:
            options["llm.listenIpInfo"] = self.listen_ip_info
        if self.local_comm_res is not None:
            options["llm.LocalCommRes"] = self.local_comm_res
        return options

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """The configuration behind an option dictionary; keys are compared without case.

        Raises:
            TypeError: not a dictionary of strings.
            ParamInvalid: an option that is not known, or a value that breaks its rule.
        """
        if not isinstance(options, Mapping):
            raise TypeError(f"options is a {type(options).__name__}: it has to be a dict of str to str")
        values: dict[str, Any] = {}
        for key, text in options.items():
            checks.instance(key, "option", str)
            checks.instance(text, key, str)
            if key.lower() not in _OPTIONS:
                raise ParamInvalid(f"option {key!r} is not known", hint=f"known are {', '.join(sorted(_OPTIONS))}")
            field, convert, rule = _OPTIONS[key.lower()]
            try:
                values[field] = convert(text)
            except ValueError:
                raise ParamInvalid(f"option {key!r} is {text!r}: it has to be {rule}") from None
        return cls(**values)


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError(text)
    return text == "1"


_OPTIONS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "ge.exec.deviceid": ("device_id", int, "a number"),
    "llm.deviceid": ("device_id", int, "a number"),
    "llm.listenipinfo": ("listen_ip_info", str, "text"),
    "llm.synckvcachewaittime": ("sync_kv_timeout", str, "a number"),
    "llm.enablecachemanager": ("enable_cache_manager", _switch, "'0' or '1'"),
    "llm.enableremotecacheaccessible": ("enable_remote_cache_accessible", _switch, "'0' or '1'"),
    "llm.linktotaltime": ("link_total_time", int, "a number"),
    "llm.linkretrycount": ("link_retry_count", int, "a number"),
    "llm.localcommres": ("local_comm_res", str, "text"),
}
