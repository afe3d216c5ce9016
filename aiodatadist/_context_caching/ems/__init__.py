"""EMS's own interface, for callers that block: the same names, checks and results.

``Ems.init`` starts the process's client, which runs one event loop in its own thread; ``Ems.get_cc`` returns its cache,
and ``Ems.shutdown`` ends it. EMS's times are milliseconds; ``lease``, which is not EMS's, is seconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.loop_thread import LoopThread, Unusable
from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.cache import Chunks, ContextCache, Key
from aiodatadist._context_caching.ems.argument_names import upstreams_names
from aiodatadist._context_caching.ems.future import CcFuture, waiting
from aiodatadist._context_caching.errors import (
    EmsErrorCode,
    EmsException,
    EmsForkError,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
    fork_refusal,
)
from aiodatadist._context_caching.identity.config import CcCacheConfig, CcConfig, CcConfig_v1, KVCacheType, check_access
from aiodatadist._context_caching.identity.names import PrimaryKey
from aiodatadist._context_caching.memory.kv_layout import LayerGroup
from aiodatadist._context_caching.memory.regions import KvBufferWrapper
from aiodatadist._context_caching.pools.contract import PoolRefused
from aiodatadist._context_caching.results import CcResult, CcStatus
from aiodatadist._context_caching.transfer.handle import BlockTransfer
from aiodatadist._counting.callbacks import shown

__all__ = ["CcCacheConfig", "CcConfig", "CcConfig_v1", "CcFuture", "CcKvOption", "CcResult", "CcStatus", "ContextCache_v1",
           "ContextCaching", "Ems", "EmsConfig", "EmsErrorCode", "EmsException", "EmsForkError",
           "EmsInternalError", "EmsInvalidArgument", "EmsIoError", "EmsTimeout", "KVCacheType", "KvBufferWrapper",
           "LayerGroup", "PrimaryKey"]  # fmt: skip

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
MOST_MS = 2**31 - 1


@dataclass(frozen=True)
class CcKvOption:
    """Options of one call.

    Attributes:
        write_rcache: if true, the local read cache keeps a copy of the values that are written.
        read_local_only: if true, only the local read cache is read. No effect on writes.
        timeout: milliseconds for the whole request; 0 means that it does not wait.

    Raises:
        EmsInvalidArgument: if a flag is not a bool, or the timeout not an int of at least 0.
    """

    write_rcache: bool = True
    read_local_only: bool = False
    timeout: int = 5000

    def __post_init__(self) -> None:
        rules.flag(self.write_rcache, "write_rcache")
        rules.flag(self.read_local_only, "read_local_only")
        rules.integer(self.timeout, "timeout", 0, MOST_MS)

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        return self.timeout / 1000


_DEFAULT = CcKvOption()


@dataclass(frozen=True)
class EmsConfig:
    """The identity of this process, and the place of its pool.

    Attributes:
        cc_config: for the caller's own keys (V0). Not together with ``cc_config_v1``.
        cc_config_v1: for block hashes (V1).
        access_id: the tenant; part of every name.
        access_key: only its form is checked. Credentials of a pool belong into its URL.
        pool: a URL, see ``open_pool``. EMS has no such field: there the pool is where the node's service is.
        cc_cache: limits on host memory. EMS has no such field.

    Raises:
        EmsInvalidArgument: if a field breaks its rule.
    """

    cc_config: CcConfig | None = None
    cc_config_v1: CcConfig_v1 | None = None
    access_id: str | None = None
    access_key: str | None = field(default=None, repr=False)
    pool: str = field(default="memory:", repr=False)  # not in repr: it may contain a password
    cc_cache: CcCacheConfig = field(default_factory=CcCacheConfig)

    def __post_init__(self) -> None:
        check_access(self.access_id, self.access_key)
        for value, name, kind in (
            (self.cc_config, "cc_config", CcConfig),
            (self.cc_config_v1, "cc_config_v1", CcConfig_v1),
            (self.cc_cache, "cc_cache", CcCacheConfig),
            (self.pool, "pool", str),
        ):
            is_left_out = value is None and name in {"cc_config", "cc_config_v1"}
            if not is_left_out and type(value) is not kind:
                raise EmsInvalidArgument(f"{name} is of type {type(value).__name__}: must be a {kind.__name__}")
        if self.cc_config is not None and self.cc_config_v1 is not None:
            raise EmsInvalidArgument("cc_config and cc_config_v1 are both given: one of them chooses the interface")

    @property
    def chosen(self) -> CcConfig | None:
        """The configuration that was given; None if there is neither."""
        return self.cc_config_v1 or self.cc_config


def _refusal(pid: int, why: Unusable) -> Exception:
    """Return the error for a blocking call that cannot be made, or that was ended from outside."""
    match why:
        case Unusable.NOT_STARTED:
            return EmsInternalError(f"Ems has no event loop: {why.value}")
        case Unusable.FORKED:
            return fork_refusal("Ems.init was called", forks.since(pid))
        case Unusable.OWN_THREAD:
            return RuntimeError("the event loop of Ems cannot wait for itself: await it instead")
    return EmsInvalidArgument("Ems.shutdown was called meanwhile")


class _Client:
    """The thread's event loop, the cache on it, and the object through which callers use it."""

    def __init__(self, config: EmsConfig) -> None:
        """Open the cache. Raises EmsException if the pool cannot be opened; then nothing is left behind."""
        self.config = config
        self.cc: ContextCaching | ContextCache_v1 | None = None
        self._pid = os.getpid()
        self._is_over = False
        self._cache: ContextCache | None = None
        self._has_warned = False
        try:
            self._thread = LoopThread("aiodatadist Ems", partial(_refusal, self._pid), self._warn, last_calls=0)
        except OSError as error:
            raise EmsInternalError(f"Ems has no event loop: {error}") from error
        if config.chosen is None:
            return
        try:
            self._cache = self._thread.call(self._open)
        except BaseException:  # also a KeyboardInterrupt: nothing is left behind
            self._thread.join()
            raise
        self.cc = ContextCache_v1(self) if config.cc_config_v1 is not None else ContextCaching(self)

    async def _open(self) -> ContextCache:
        config, settings = self.config, self.config.cc_cache
        if config.chosen is None:
            raise EmsInternalError("a client without a configuration has no cache")
        return await ContextCache.open(
            config.chosen,
            config.pool,
            settings.read_cache_bytes,
            fill_on_read=settings.fill_on_read,
            bytes_in_flight=settings.bytes_in_flight,
            access_id=config.access_id,
        )

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a blocking call of ContextCaching stops an event loop: await ContextCache's instead")

    def check_pid(self) -> None:
        """Raise EmsForkError in a child of the process that called ``Ems.init``."""
        if self._pid != os.getpid():
            raise fork_refusal("Ems.init was called", forks.since(self._pid))

    def _check(self) -> ContextCache:
        self.check_pid()
        if self._is_over or self._cache is None:
            raise EmsInvalidArgument("not initialised: call Ems.init first, then Ems.get_cc again")
        return self._cache

    def run(self, work: Callable[[ContextCache], Coroutine[Any, Any, T]]) -> T:
        """Run the work on the client's loop, and wait for its result."""
        cache = self._check()
        return self._thread.call(lambda: work(cache))

    def start(self, begin: Callable[[ContextCache], BlockTransfer]) -> CcFuture:
        """Check the arguments and start a transfer on the client's loop."""

        begun: list[CcFuture] = []

        async def start(cache: ContextCache) -> CcFuture:
            with upstreams_names():
                begun.append(CcFuture(self._thread, begin(cache)))
            return begun[0]

        try:
            return self.run(start)
        except (EmsException, RuntimeError):  # refused; RuntimeError: on the loop's own thread, which must not wait
            raise
        except BaseException:  # an interrupt while the loop started the transfer: the caller has no handle to stop it
            for future in begun:
                future.stop()
            raise

    def close(self) -> None:
        """Close the cache and join the thread. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return  # the client belongs to the parent process
        self._is_over = True
        try:
            if self._cache is not None:
                self._thread.call(self._cache.aclose)
        finally:
            self._thread.join()


class Ems:
    """The process's client. Each call may come from any thread."""

    _lock = threading.Lock()
    _client: _Client | None = None

    @classmethod
    def init(cls, config: EmsConfig) -> None:
        """Start the client. A second call with an equal configuration does nothing.

        Raises:
            EmsInvalidArgument: if ``config`` is not an EmsConfig, or not equal to that of the running client.
            EmsException: if the pool cannot be opened; there is no client then. With ``EMS_RECOVERD_ERROR`` the pool is
                not there yet: call again later. With other codes calling again does not help.
        """
        if not isinstance(config, EmsConfig):
            raise EmsInvalidArgument(f"config is of type {type(config).__name__}: must be an EmsConfig")
        with cls._lock:
            if cls._client is not None:
                cls._client.check_pid()
                if cls._client.config != config:
                    raise EmsInvalidArgument("Ems is initialised with another configuration: call Ems.shutdown first")
                return
            try:
                cls._client = _Client(config)
            except EmsException as error:
                is_refused = isinstance(error.__cause__, PoolRefused)
                if error.status_code() in {EmsErrorCode.EMS_IO_ERROR, EmsErrorCode.EMS_IO_TIMEOUT} and not is_refused:
                    raise EmsException(error.message(), EmsErrorCode.EMS_RECOVERD_ERROR) from error
                raise

    @classmethod
    def get_cc(cls) -> ContextCaching | ContextCache_v1 | None:
        """Return the cache of the running client, or None if there is none.

        Raises:
            EmsForkError: if the client was started before a fork.
        """
        client = cls._client
        if client is None:
            return None
        client.check_pid()
        return client.cc

    @classmethod
    def check_health(cls) -> bool:
        """Return True if the pool works right now. Return False without a client, and while the client shuts down.

        Raises:
            EmsForkError: if the client was started before a fork.
        """
        client = cls._client
        if client is None:
            return False
        client.check_pid()
        try:
            return client.cc is not None and client.run(lambda cache: cache.check_health())
        except EmsInvalidArgument:  # the client has ended, or is ending
            return False

    @classmethod
    def shutdown(cls) -> None:
        """Cancel running calls, close the cache and join the thread. Afterwards ``init`` may be called again.

        Raises:
            EmsInternalError: if the device did not release memory. Everything else was released.
        """
        with cls._lock:
            client, cls._client = cls._client, None
            if client is not None:
                client.close()


def _option(option: Any) -> CcKvOption:
    if not isinstance(option, CcKvOption):
        raise EmsInvalidArgument(f"option is {option!r}: must be a CcKvOption")
    return option


def _writing(option: Any) -> dict[str, Any]:
    """Return the options of a call that stores."""
    o = _option(option)
    return {"timeout": o.seconds, "write_rcache": o.write_rcache}


def _reading(option: Any) -> dict[str, Any]:
    """Return the options of a call that reads."""
    o = _option(option)
    return {"timeout": o.seconds, "read_local_only": o.read_local_only}


_V1_ARGUMENTS = frozenset({"slot_mapping", "hashes", "offsets", "chunk_descs"})


def _of_v0(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse a call with V1's arguments, by name or by position, with the reason instead of a TypeError."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        named = sorted(_V1_ARGUMENTS & kwargs.keys())
        if named or (len(args) > 1 and not isinstance(args[1], CcKvOption)):
            what = f"{named[0]} is an argument of V1" if named else f"option is {shown(args[1])}: must be a CcKvOption"
            name = method.__name__
            raise EmsInvalidArgument(
                f"{what}, but this client is V0: call {name}(option, key_list, value_list), or give Ems.init a cc_config_v1"
            )
        return method(*args, **kwargs)

    return checked


class ContextCaching:
    """Values by the caller's own keys (V0), as returned by ``Ems.get_cc``."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    @_of_v0
    def async_save(
        self, option: CcKvOption, key_list: Sequence[Key], value_list: Sequence[Sequence[KvBufferWrapper]]
    ) -> CcFuture:
        """Start :meth:`save`. Raises EmsInvalidArgument; every other error comes with the result."""
        return self._client.start(lambda cache: cache.start_save_values(key_list, value_list, **_writing(option)))

    save: Final = _of_v0(
        waiting(
            async_save,
            """Store the regions of each key, one after the other. Blocks.

            Raises:
                EmsException: if an argument is wrong, the deadline is reached, or the pool does not answer.
            """,
        )
    )

    @_of_v0
    def async_load(
        self, option: CcKvOption, key_list: Sequence[Key], value_list: Sequence[Sequence[KvBufferWrapper]]
    ) -> CcFuture:
        """Start :meth:`load`. Raises EmsInvalidArgument; every other error comes with the result."""
        return self._client.start(lambda cache: cache.start_load_values(key_list, value_list, **_reading(option)))

    load: Final = _of_v0(
        waiting(
            async_load,
            """Read values, up to the first one that is missing, into regions of the same total length. Blocks.

            Raises:
                EmsException: if an argument is wrong, the deadline is reached, or the pool does not answer.
            """,
        )
    )

    def remove(self, keys: Sequence[Key]) -> int:
        """Remove values; return how many the pool had.

        EMS has no such call. It is for callers that change the meaning of a key.
        """
        return self._client.run(lambda cache: cache.remove_values(keys))


class ContextCache_v1:  # noqa: N801 - EMS's name
    """Blocks by their hashes (V1), as returned by ``Ems.get_cc``."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    def register_kvcache(
        self,
        kvcache: Sequence[Sequence[Any]],
        store_layer_group_desc: Sequence[Sequence[int] | LayerGroup] | None = None,
    ) -> None:
        """Register the KV cache: for each layer its tensors. Call it once, before the first data call.

        Raises:
            EmsException: if it is no KV cache, or transfers are running.
        """
        self._client.run(lambda cache: cache.register_kvcache(kvcache, store_layer_group_desc))

    def unregister_kvcache(self) -> None:
        """Forget the KV cache. EMS has no such call. Raises EmsInvalidArgument if transfers are running."""

        async def unregister(cache: ContextCache) -> None:
            cache.unregister_kvcache()

        self._client.run(unregister)

    def async_save(
        self,
        /,
        slot_mapping: Sequence[int] | None = None,
        hashes: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        option: CcKvOption = _DEFAULT,
        **kwargs: Any,
    ) -> CcFuture:
        """Start :meth:`save`. Raises EmsInvalidArgument; every other error comes with the result."""

        def begin(cache: ContextCache) -> BlockTransfer:
            cache.check_registered()
            terms = {"slots": slot_mapping, "offsets": offsets, **_writing(option), "chunks": _chunks(kwargs)}
            return cache.start_save([] if hashes is None else hashes, **terms)

        return self._client.start(begin)

    save: Final = waiting(
        async_save,
        """Store blocks whose tokens are in the slots of ``slot_mapping``, or of ``chunk_descs``. Blocks.

        Raises:
            EmsException: if an argument is wrong, the deadline is reached, or the pool does not answer.
        """,
    )

    def async_load(
        self,
        /,
        slot_mapping: Sequence[int] | None = None,
        hashes: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        option: CcKvOption = _DEFAULT,
        **kwargs: Any,
    ) -> CcFuture:
        """Start :meth:`load`. Raises EmsInvalidArgument; every other error comes with the result."""

        def begin(cache: ContextCache) -> BlockTransfer:
            cache.check_registered()
            terms = {"slots": slot_mapping, "offsets": offsets, **_reading(option), "chunks": _chunks(kwargs)}
            return cache.start_load([] if hashes is None else hashes, **terms)

        return self._client.start(begin)

    load: Final = waiting(
        async_load,
        """Read blocks, up to the first one that is missing. Arguments and errors as in :meth:`save`.""",
    )

    def exists(
        self,
        hashes: Sequence[int],
        option: CcKvOption = _DEFAULT,
        *,
        lease: float = 0.0,
        all_ranks: bool = False,
        groups: Sequence[int] | None = None,
    ) -> CcResult:
        """Count the blocks that are there, from the first one without a gap. A failing or slow pool counts as empty.

        The keyword arguments are not EMS's.

        Args:
            lease: seconds for which the pool is asked to keep what was found.
            all_ranks: if true, count only blocks that all ranks have.
            groups: layer groups that must all have a block. If None, any one group is enough.

        Raises:
            EmsInvalidArgument: if an argument is wrong.
        """

        async def exists(cache: ContextCache) -> CcResult:
            return await cache.exists(hashes, **_reading(option), all_ranks=all_ranks, lease=lease, groups=groups)

        return self._client.run(exists)

    def is_ready(self, ccfuture: CcFuture) -> bool:
        """Return True if the transfer has ended, also with an error. Never blocks.

        Raises:
            EmsInvalidArgument: if ``ccfuture`` is not a CcFuture.
        """
        return _future(ccfuture).done()

    def get_result(self, ccfuture: CcFuture) -> CcResult:
        """Wait until the transfer has ended; return its result.

        Raises:
            EmsInvalidArgument: if ``ccfuture`` is not a CcFuture.
            EmsException: if the transfer failed.
        """
        return _future(ccfuture).result()

    def remove(self, hashes: Sequence[int]) -> int:
        """Remove blocks of this rank; return how many values the pool had of them. EMS has no such call."""
        return self._client.run(lambda cache: cache.remove(hashes))


def _future(value: Any) -> CcFuture:
    if not isinstance(value, CcFuture):
        raise EmsInvalidArgument(f"ccfuture is {value!r}: must be the result of async_save or async_load")
    return value


def _chunks(kwargs: dict[str, Any]) -> Chunks | None:
    chunks: Chunks | None = kwargs.pop("chunk_descs", None)
    for name in kwargs:
        if name in {"token_ids", "mask"}:
            raise EmsInvalidArgument(f"{name} is no longer accepted: give slot_mapping and offsets, or chunk_descs")
        raise EmsInvalidArgument(
            f"{name} is not an argument of this call: beside the named ones only chunk_descs is accepted"
        )
    return chunks
