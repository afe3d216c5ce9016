"""The rules of single options: the checks that :class:`~aiodatadist.LLMConfig` makes before it keeps a value.

Every check returns the value as it is kept. It raises ``TypeError`` for a wrong type and ``ValueError`` for an integer
outside its C type. Anything else raises ``ParamInvalid``, whose message names the value, the limit and the rule.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from itertools import pairwise
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretBytes,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # pydantic itself has it from 2.10 on

from aiodatadist._config.certificates import Contexts
from aiodatadist._values import checks
from aiodatadist._values.signatures import readable
from aiodatadist._values.sizes import Size
from aiodatadist.errors import ParamInvalid

MAX_LOCAL_COMM_RES: Final = 64 << 10
"""The largest ``local_comm_res``, in characters."""

MAX_JSON: Final = 64 << 10
"""The largest other option that is JSON, in characters."""

MAX_SHAPED: Final = 16 << 10
"""The largest option that describes a pool or a policy, in characters. An error in it is found within milliseconds."""

MAX_PATH: Final = 4096
"""The longest path, in characters."""

MAX_OPTIONS: Final = 1024
"""The largest number of entries in an option dictionary, and in ``ge_options``."""

MAX_PAGES: Final = 2**32 - 1
"""A pool must have fewer pages than this."""

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page: the size classes of ``buf_pool_cfg`` consist of these."""

DEVICE_KEYS: Final = ("ge.exec.deviceid", "ge.session_device_id")
"""Entries of ``ge_options``, in lower case, that mean ``device_id``."""

POOL_SIZE: Final = "ge.flowgraphmemmaxsize"
"""The entry, in lower case, with the pool size of the KvCacheManager mode."""

VENDORS: Final = ("ge.", "llm.")
"""The prefixes of the vendor's keys, in lower case."""

TRAFFIC_CLASSES: Final = range(0, 256, 4)
"""The values of ``rdma_traffic_class`` that HCCL accepts. Any other uint32 is kept, and has no effect."""

SERVICE_LEVELS: Final = range(8)
"""The values of ``rdma_service_level`` that HCCL accepts. Any other uint32 is kept, and has no effect."""

Check = Callable[[Any], Any]


def optional(check: Check) -> BeforeValidator:
    """Return a validator that keeps None as "not set", and passes everything else to ``check``."""
    return BeforeValidator(lambda value: None if value is None else check(value))


# ---- numbers and words ----


def device_id(value: Any) -> int | list[int]:
    """Check a device, or a list of them: int32, at least 0. Several are refused later, by :func:`one_device`."""
    if isinstance(value, (list, tuple)):
        checks.sequence(value, "device_id", int)
        if not value:
            raise ParamInvalid(f"device_id is {value}: exactly one device belongs to a process")
        devices = [_device(device) for device in value]
        return devices[0] if len(devices) == 1 else devices
    return _device(value)


def one_device(value: int | list[int]) -> int:
    """Return the device. Raises ParamInvalid if there are several."""
    if isinstance(value, list):
        raise ParamInvalid(f"device_id is {value}: exactly one device belongs to a process")
    return value


def _device(value: Any) -> int:
    if checks.integer(value, "device_id", checks.INT32) < 0:
        raise ParamInvalid(f"device_id is {value}: must be at least 0")
    return int(value)


def milliseconds(value: Any) -> int:
    """Check ``sync_kv_timeout``: an int32 above 0, or its digits."""
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal()):
            raise ParamInvalid(f"sync_kv_timeout is {value!r}: must be digits, in milliseconds")
        value = int(value)
    if checks.integer(value, "sync_kv_timeout", checks.INT32) <= 0:
        raise ParamInvalid(f"sync_kv_timeout is {value}: must be above 0 milliseconds")
    return int(value)


def heartbeat_interval(value: Any) -> float:
    """Check ``heartbeat_interval``: seconds in [0.01, 600]."""
    if isinstance(value, bool) or not isinstance(value, (float, int)):
        raise TypeError(f"heartbeat_interval is {value!r} of type {type(value).__name__}: must be a number of seconds")
    if not 0.01 <= value <= 600:  # false for a NaN, too
        raise ParamInvalid(f"heartbeat_interval is {value}: must be in [0.01, 600] seconds")
    return float(value)


def bounded(name: str, low: int, high: int, *, step: int = 1, kind: range | None = None) -> Check:
    """Return a check for an int in [low, high] that is a multiple of ``step``, and within the C type ``kind`` before that."""

    def check(value: Any) -> int:
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be an int")
        if kind is not None:
            checks.integer(value, name, kind)
        if not low <= value <= high:
            raise ParamInvalid(f"{name} is {value}: must be in [{low}, {high}]")
        if value % step:
            raise ParamInvalid(f"{name} is {value}: must be a multiple of {step}")
        return value

    return check


def uint32(name: str) -> Check:
    """Return a check for any uint32."""
    return lambda value: checks.integer(value, name, checks.UINT32)


def known(value: int | None, allowed: range) -> int | None:
    """Return the value for HCCL, or None if it is outside the manual's range."""
    return value if value in allowed else None


def share(name: str) -> Check:
    """Return a check for a float, or an int that stands for one, in [0, 1]."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (float, int)):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be a float")
        if not 0 <= value <= 1:  # false for a NaN, too
            raise ParamInvalid(f"{name} is {value}: must be in [0.0, 1.0]")
        return float(value)

    return check


def flag(name: str) -> BeforeValidator:
    """Return a validator for a bool; no other int is accepted."""
    return BeforeValidator(lambda value: checks.instance(value, name, bool))


def choice(name: str, *allowed: str) -> Check:
    """Return a check for one of these words."""

    def check(value: Any) -> str:
        if checks.instance(value, name, str) not in allowed:
            raise ParamInvalid(f"{name} is {value!r}: must be {' or '.join(allowed)}")
        return str(value)

    return check


def kept(name: str) -> Check:
    """Return a check for any str of at most 64 Ki characters, kept as it was given."""
    return lambda value: characters(value, name, MAX_JSON)


def text(name: str) -> Check:
    """Return a check for a str; an empty one counts as None."""
    return lambda value: checks.instance(value, name, str) or None


def folder(name: str) -> Check:
    """Return a check for the path of a folder: a str, or an object that stands for one. An empty one counts as None."""

    def check(value: Any) -> str | None:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        return characters(checks.instance(path, name, str), name, MAX_PATH) or None

    return check


def trust(value: Any) -> str | Contexts | None:
    """Check ``trust``: the path of a folder, or a pair of contexts of TLS. An empty path counts as None."""
    if isinstance(value, Contexts):
        return value
    if not isinstance(value, (tuple, list)):
        return cast("str | None", folder("trust")(value))
    checks.sequence(value, "trust", ssl.SSLContext)
    if len(value) != 2:
        raise ParamInvalid(f"trust has {len(value)} contexts: must have two, the client's and the server's")
    return Contexts(*value)


def secret(value: Any) -> SecretBytes | None:
    """Check ``auth_key``: at least one byte. The messages never show the value."""
    if value is None or isinstance(value, SecretBytes):
        key = value
    elif isinstance(value, (bytes, str)):
        key = SecretBytes(value.encode() if isinstance(value, str) else value)
    else:
        raise TypeError(f"auth_key is of type {type(value).__name__}: must be bytes or str")
    if key is not None and not key.get_secret_value():
        raise ParamInvalid("auth_key is empty: a key has at least 1 byte; without authentication it is None")
    return key


# ---- options of the engine ----


def ge_options(value: Any) -> dict[str, str]:
    """Check a dict of str to str and return a copy; None becomes an empty one.

    All keys must begin with ``ge.`` or ``llm.``, as the vendor's do, even if they are unknown here. A device is digits;
    several are joined by ``;``.
    """
    given = checks.instance({} if value is None else value, "ge_options", Mapping)
    count_options(given, "ge_options")
    entries = dict(given)
    for key, entry in entries.items():
        lower = checks.instance(key, "a key of ge_options", str).lower()
        checks.instance(entry, f"ge_options[{key!r}]", str)
        if not lower.startswith(VENDORS):
            raise ParamInvalid(f"ge_options has {key!r}: its keys must begin with 'ge.' or 'llm.'")
        if lower in DEVICE_KEYS:
            device_id(_devices(key, entry))
    return entries


def count_options(entries: Mapping[Any, Any], name: str) -> None:
    """Raise ParamInvalid if there are too many entries."""
    if len(entries) > MAX_OPTIONS:
        raise ParamInvalid(f"{name} has {len(entries)} entries: the limit is {MAX_OPTIONS}")


def take_device(entries: dict[str, str]) -> int | list[int] | None:
    """Remove the entries of ``ge_options`` that name a device, or several, and return it.

    Raises:
        ParamInvalid: if one entry does not begin with the device of the other.
    """
    named = {key: entry for key, entry in entries.items() if key.lower() in DEVICE_KEYS}
    lists = sorted((_devices(key, entry) for key, entry in named.items()), key=len)
    if len(lists) > 1 and lists[0] != lists[-1][: len(lists[0])]:
        raise ParamInvalid(f"ge_options has {named}: exactly one device belongs to a process")
    for key in named:
        del entries[key]
    return device_id(lists[-1]) if lists else None


def _devices(key: str, entry: str) -> tuple[int, ...]:
    try:
        return read_devices(entry)
    except ValueError:
        raise ParamInvalid(f"ge_options[{key!r}] is {entry!r}: must be the number of a device") from None


def read_devices(text: str) -> tuple[int, ...]:
    """Return the numbers that ``;`` joins in a text. Raises ValueError if it is something else."""
    numbers = text.split(";")
    if not all(re.fullmatch(r"-?[0-9]{1,20}", number) for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))


def pool_size(entries: Mapping[str, str]) -> int | None:
    """Return ``ge.flowGraphMemMaxSize`` in bytes, whatever the case of its letters; None if it is not there.

    Raises:
        ParamInvalid: if it is not digits only.
    """
    for key, entry in entries.items():
        if key.lower() == POOL_SIZE:
            if not (entry.isascii() and entry.isdecimal()):
                raise ParamInvalid(f"ge_options[{key!r}] is {entry!r}: must be digits only, in bytes")
            return int(entry)
    return None


# ---- JSON ----


def load(value: Any, name: str) -> Any:
    """Parse a JSON text of at most 64 Ki characters. Raises TypeError or ParamInvalid if it is not one."""
    text = characters(value, name, MAX_JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"{name} is not JSON: {error}") from None


def characters(value: Any, name: str, limit: int) -> str:
    """Check that a text has at most ``limit`` characters. Raises TypeError or ParamInvalid."""
    text = checks.instance(value, name, str)
    if len(text) > limit:
        raise ParamInvalid(f"{name} has {len(text)} characters: the limit is {limit}")
    return text


def local_comm_res(value: Any) -> str:
    """Check JSON of at most 64 Ki characters. Unlike None, an empty text means "find the resources yourself"."""
    resource = characters(value, "local_comm_res", MAX_LOCAL_COMM_RES)
    if resource:
        load(resource, "local_comm_res")
    return resource


def cluster_info(value: Any) -> str | None:
    """Check a JSON object, and turn each ``listen_ip_info[].ip`` into an integer: its network bytes read little-endian.

    An address that is already an integer stays as it is, so the result can be passed in again.
    """
    if checks.instance(value, "cluster_info", str) == "":
        return None
    cluster = load(value, "cluster_info")
    if not isinstance(cluster, dict):
        raise ParamInvalid(f"cluster_info is {shortened(cluster)}: must be a JSON object")
    listeners = cluster.get("listen_ip_info", [])
    if not isinstance(listeners, list):
        raise ParamInvalid(f"cluster_info: listen_ip_info is {shortened(listeners)}: must be a list")
    for i, listener in enumerate(listeners):
        where = f"cluster_info: listen_ip_info[{i}]"
        if not isinstance(listener, dict) or "ip" not in listener:
            raise ParamInvalid(f"{where} is {shortened(listener)}: must be an object with an ip")
        listener["ip"] = _ip_number(listener["ip"], f"{where}.ip")
    return json.dumps(cluster)


def _ip_number(ip: object, name: str) -> int:
    if isinstance(ip, int) and not isinstance(ip, bool) and ip in checks.UINT32:
        return ip
    try:
        return int.from_bytes(ipaddress.IPv4Address(ip if isinstance(ip, str) else "").packed, "little")
    except ValueError:
        raise ParamInvalid(f"{name} is {shortened(ip)}: must be an IPv4 address, or its uint32") from None


class JsonOption(BaseModel):
    """An option that is a JSON object of a known shape. Unknown fields are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Self, name: str) -> Self:
        """Read the option called ``name``: JSON, a mapping with the same fields, or an object that this method returned.

        Raises:
            TypeError: if it is none of these.
            ParamInvalid: if it is not an object of this shape, a value breaks its rule, or it has more than 16 Ki
                characters.
        """
        if isinstance(value, cls):
            return value
        checks.instance(value, name, (str, Mapping, cls))
        try:
            if isinstance(value, Mapping):
                return cls.model_validate(dict(value))
            return cls.model_validate_json(characters(value, name, MAX_SHAPED))
        except ValidationError as error:
            is_whole = not error.errors(include_url=False)[0]["loc"]
            hint = f"write an object with these fields: {', '.join(cls.model_fields)}" if is_whole else None
            raise ParamInvalid(f"{name}: {_first_problem(error)}", hint=hint) from None
        except ParamInvalid as error:
            raise ParamInvalid(f"{name}: {error.args[0]}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(map(str, problem["loc"])) or "the text"
    if problem["type"] == "missing":
        return f"{where} is missing: must be given"
    if problem["type"] == "extra_forbidden":
        return f"{where} is {shortened(problem['input'])}: there is no such field"
    if problem["type"] == "model_type":
        return f"{where} is {shortened(problem['input'])}: must be an object"
    rule = problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{where} is {shortened(problem['input'])}: {rule}"


class WholeOption(JsonOption):
    """An option object that callers construct themselves. There, too, an error is one sentence."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, value: Any, made: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return made(value)
        except ValidationError as error:
            raise ParamInvalid(_first_problem(error)) from None


@readable
class PoolConfig(WholeOption):
    """The options ``mem_pool_cfg`` and ``host_mem_pool_cfg``: ``{"memory_size": 104857600, "page_shift": 16}``.

    Attributes:
        memory_size: bytes of the pool, or a text like ``"1GiB"``: at least one page, and fewer than 2**32 - 1 pages.
        page_shift: a page has ``1 << page_shift`` bytes; 10 to 30, by default 16 (64 KiB).
        populate: when softnpu's memory gets its pages, which the first transfer into it would otherwise wait for:
            ``"background"``, by a thread that gives way to transfers, as long as an eighth of the machine's memory and
            of the container's limit is left; ``"init"``, before ``init`` returns; or ``"use"``. An NPU's memory always
            has them.

    Raises ParamInvalid if a value breaks its rule, or an unknown field is given.
    """

    memory_size: Size = Field(gt=0, lt=2**64)
    page_shift: int = Field(default=16, ge=10, lt=31)
    populate: Literal["background", "init", "use"] = "background"

    if TYPE_CHECKING:  # a type checker knows only what is kept

        def __init__(
            self,
            *,
            memory_size: int | str,
            page_shift: int = 16,
            populate: Literal["background", "init", "use"] = "background",
        ) -> None: ...

    @model_validator(mode="after")
    def _count_pages(self) -> Self:
        if self.pages == 0:
            raise ParamInvalid(f"memory_size is {self.memory_size}: must be at least a page, {self.page} bytes")
        if self.pages >= MAX_PAGES:
            raise ParamInvalid(
                f"memory_size is {self.memory_size}, that is {self.pages} pages of {self.page} bytes: "
                f"must be fewer than {MAX_PAGES} pages"
            )
        return self

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return 1 << self.page_shift

    @property
    def pages(self) -> int:
        """The number of whole pages; the rest of ``memory_size`` is not used."""
        return self.memory_size >> self.page_shift


class BufferClass(JsonOption):
    """A size class of ``buf_pool_cfg``. All three values are bytes.

    Attributes:
        total_size: bytes of the class: a multiple of 2 MiB and of ``blk_size``.
        blk_size: the smallest allocation: a power of two, up to 2 MiB.
        max_buf_size: the largest allocation: at least ``blk_size``, below ``total_size``.
    """

    total_size: int = Field(gt=0, le=0xFFFFFFFF, multiple_of=HUGE_PAGE)
    blk_size: int = Field(gt=0, le=HUGE_PAGE)
    max_buf_size: int = Field(gt=0)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        total, block, largest = self.total_size, self.blk_size, self.max_buf_size
        if block & (block - 1):  # a power of two up to 2 MiB divides every total_size
            raise ParamInvalid(f"blk_size is {block}: must be a power of two")
        if largest < block:
            raise ParamInvalid(f"max_buf_size is {largest}: must be at least blk_size, {block}")
        if largest >= total:
            raise ParamInvalid(f"max_buf_size is {largest}: must be below total_size, {total}")
        return self


class BufferPoolConfig(JsonOption):
    """The option ``buf_pool_cfg``: size classes in order of ``max_buf_size``, or only the whole pool's size in bytes."""

    buf_cfg: Annotated[list[BufferClass] | None, Field(min_length=1, max_length=256)] = None
    buf_pool_size: int | None = Field(default=None, gt=0, lt=2**64)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.buf_cfg is None and self.buf_pool_size is None:
            raise ParamInvalid("buf_cfg is missing: give it, or buf_pool_size")
        sizes = [size.max_buf_size for size in self.buf_cfg or ()]
        for i, (before, size) in enumerate(pairwise(sizes), 1):
            if size <= before:
                raise ParamInvalid(f"buf_cfg.{i}.max_buf_size is {size}: must be above the one before it, {before}")
        return self


def shaped(name: str, shape: type[JsonOption]) -> Check:
    """Return a check for an option of this shape, kept as JSON. A text is kept as given; an empty one counts as None."""

    def check(value: Any) -> str | None:
        if value == "":
            return None
        pool = shape.parse(value, name)
        return value if isinstance(value, str) else pool.model_dump_json(exclude_unset=True)

    return check
