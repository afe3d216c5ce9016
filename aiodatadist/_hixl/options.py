"""The options of an engine: HIXL's dictionary of texts, and what each comes to here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aiodatadist._config.llm_config import LLMConfig
from aiodatadist._config.option_rules import SERVICE_LEVELS, TRAFFIC_CLASSES, count_options, load
from aiodatadist._hixl.resources import Resources, read_resources
from aiodatadist._values import checks
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

FABRIC: Final = "EnableUseFabricMem"
TRAFFIC_CLASS: Final = "RdmaTrafficClass"
SERVICE_LEVEL: Final = "RdmaServiceLevel"
BUFFER_POOL: Final = "BufferPool"
RESOURCES: Final = "GlobalResourceConfig"
AUTO_CONNECT: Final = "AutoConnect"
LOCAL_COMM_RES: Final = "LocalCommRes"
KEYS: Final = (FABRIC, TRAFFIC_CLASS, SERVICE_LEVEL, BUFFER_POOL, RESOURCES, AUTO_CONNECT, LOCAL_COMM_RES)
_OLD: Final = {f"adxl.{key}": key for key in (TRAFFIC_CLASS, SERVICE_LEVEL, BUFFER_POOL, LOCAL_COMM_RES)}
_OURS: Final = ("aiodatadist.", "ge.exec.deviceid")
MAX_BUFFERS: Final = 1024
MAX_BUFFER_MIB: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class BufferPool:
    """The staging buffers of an engine.

    Attributes:
        count: the number of buffers; 0 if there are none.
        nbytes: the bytes of each.
    """

    count: int = 4
    nbytes: int = 8 << 20


@dataclass(slots=True)
class Options:
    """The options of one engine, checked.

    Attributes:
        config: the options of its cluster.
        buffers: its staging buffers.
        auto_connect: True if a transfer connects by itself.
        resources: what ``GlobalResourceConfig`` says.
        comm_version: the version of ``LocalCommRes``; empty if it was not given.
        remarks: a line for each option that was given and changes nothing here, with the reason.
    """

    config: LLMConfig
    buffers: BufferPool = field(default_factory=BufferPool)
    auto_connect: bool = False
    resources: Resources = field(default_factory=Resources)
    comm_version: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def lists_requests(self) -> bool:
        """True if HIXL's newer engine was asked for, which alone lists the states of all requests."""
        return self.comm_version == "1.3" or bool(self.resources.protocols)


def read_options(options: Mapping[str, str] | LLMConfig | Options | None) -> Options:
    """Return the options of an engine. Keys that begin with ``aiodatadist.`` are those of :class:`LLMConfig`.

    Options that have been read are returned as they are.

    Raises:
        TypeError: if it is not a dictionary of texts.
        ParamInvalid: if an option is unknown, or breaks its rule.
        FeatureNotEnabled: if an option asks for what is not here.
    """
    if isinstance(options, Options):
        return options
    if options is None or isinstance(options, LLMConfig):
        return Options(LLMConfig() if options is None else options.model_copy(deep=True))
    checks.instance(options, "options", Mapping)
    count_options(options, "options")
    given: dict[str, str] = {}
    ours: dict[str, str] = {}
    for key, text in options.items():
        checks.instance(key, "option", str)
        checks.instance(text, f"option {key!r}", str)
        name = _OLD.get(key, key)
        if name in KEYS:
            if given.setdefault(name, text) != text:
                raise ParamInvalid(f"option {key!r} is {text!r}: {name!r} is the same option with another value")
        elif key.lower().startswith(_OURS):
            ours[key] = text
        else:
            raise ParamInvalid(
                f"option {key!r} is unknown: must be one of {', '.join(KEYS)}, or begin with 'aiodatadist.'"
            )
    found = Options(LLMConfig.from_options({**_BOTH_MODES, **ours}))
    for name, text in given.items():
        _READERS[name](found, text)
    _check_together(found, given)
    return found


_BOTH_MODES: Final = {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ParamInvalid(f"option {name!r} is {text!r}: must be '0' or '1'")
    return text == "1"


def _number(name: str, text: str, allowed: range, rule: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) not in allowed:
        raise ParamInvalid(f"option {name!r} is {text!r}: must be {rule}")
    return int(text)


def _fabric(found: Options, text: str) -> None:
    if _flag(FABRIC, text):
        raise FeatureNotEnabled(
            f"option {FABRIC!r} is '1': there is no fabric memory here", hint="leave it out, or '0'"
        )


def _traffic_class(found: Options, text: str) -> None:
    rule = "a multiple of 4 in [0, 255]"
    found.config.rdma_traffic_class = _number(TRAFFIC_CLASS, text, TRAFFIC_CLASSES, rule)


def _service_level(found: Options, text: str) -> None:
    found.config.rdma_service_level = _number(SERVICE_LEVEL, text, SERVICE_LEVELS, "in [0, 7]")


def _buffer_pool(found: Options, text: str) -> None:
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    count, mib = (int(match[1]), int(match[2])) if match else (-1, 0)
    if (count, mib) == (0, 0):
        found.buffers = BufferPool(0, 0)
        return
    if not (1 <= count <= MAX_BUFFERS and 1 <= mib <= MAX_BUFFER_MIB):
        limits = f"1 to {MAX_BUFFERS} buffers of 1 to {MAX_BUFFER_MIB} MiB"
        raise ParamInvalid(f"option {BUFFER_POOL!r} is {text!r}: must be 'COUNT:MIB', {limits}, or '0:0'")
    found.buffers = BufferPool(count, mib << 20)


def _auto_connect(found: Options, text: str) -> None:
    found.auto_connect = _flag(AUTO_CONNECT, text)


def _resources(found: Options, text: str) -> None:
    found.resources = read_resources(load(text, RESOURCES) if text else {}, RESOURCES)
    found.remarks += found.resources.remarks


def _local_comm_res(found: Options, text: str) -> None:
    """Read this device's part of a rank table. Version 1.3 has none: the table is then made from the machine."""
    if not text:
        return
    table = load(text, LOCAL_COMM_RES)
    if not isinstance(table, dict):
        raise ParamInvalid(f"{LOCAL_COMM_RES} is {table!r}: must be a JSON object")
    version = table.get("version", "1.0")
    if version not in ("1.0", "1.2", "1.3"):
        raise ParamInvalid(f"{LOCAL_COMM_RES}: version is {version!r}: must be '1.0', '1.2' or '1.3'")
    found.comm_version = version
    if version != "1.3":
        found.config.local_comm_res = text
        return
    if table.get("endpoint_list"):
        raise FeatureNotEnabled(
            f"{LOCAL_COMM_RES}: endpoint_list of version 1.3 names endpoints of an engine that is not here",
            hint="leave it out: the addresses of the device are found on the machine",
        )
    found.remarks.append(f"{LOCAL_COMM_RES} has version 1.3: bytes travel over communicators, as with 1.2")


_READERS: Final = {
    FABRIC: _fabric,
    TRAFFIC_CLASS: _traffic_class,
    SERVICE_LEVEL: _service_level,
    BUFFER_POOL: _buffer_pool,
    AUTO_CONNECT: _auto_connect,
    RESOURCES: _resources,
    LOCAL_COMM_RES: _local_comm_res,
}


def _check_together(found: Options, given: Mapping[str, str]) -> None:
    """Let a file stand for ``LocalCommRes`` where that is absent, and compare options with each other.

    Raises:
        ParamInvalid: if staging buffers are asked for together with version 1.3.
    """
    path = found.resources.local_comm_res_path
    if path and not given.get(LOCAL_COMM_RES):
        _local_comm_res(found, path.read_text())
    if found.resources.max_channels and not found.auto_connect:
        found.remarks.append(f"{RESOURCES}: channel_pool has no effect without {AUTO_CONNECT}")
    if found.comm_version != "1.3":
        return
    pool = given.get(BUFFER_POOL, "0:0")
    if pool != "0:0":
        raise ParamInvalid(f"option {BUFFER_POOL!r} is {pool!r}: with {LOCAL_COMM_RES} 1.3 only '0:0' is allowed")
    found.buffers = BufferPool(0, 0)
