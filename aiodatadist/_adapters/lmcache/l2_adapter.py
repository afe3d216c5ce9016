"""LMCache's second-level storage: three kinds of tasks, each with an event fd that reports their ends."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from pydantic import ValidationError

from aiodatadist._adapters.lmcache.buffers import bytes_of
from aiodatadist._adapters.value_service import ValueService, ValueSettings, short


class AioDataDistL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache has no types here
    """The configuration: ``adapter_params`` is a :class:`~aiodatadist._adapters.value_service.ValueSettings`."""

    def __init__(self, settings: ValueSettings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Return the configuration. Raises ValueError if a setting is wrong."""
        try:
            return cls(ValueSettings.model_validate(d))
        except ValidationError as error:
            raise ValueError(f"adapter_params: {error}") from None

    @classmethod
    def help(cls) -> str:
        return "\n".join(f"- {name} (default {info.default!r})" for name, info in ValueSettings.model_fields.items())


def name_of(key: Any) -> str:
    """Return the name of a value in the pool.

    All parts of an ObjectKey are in it; none of the first three contains the separator.
    """
    parts = (key.model_name, f"{key.kv_rank:x}", key.chunk_hash.hex(), str(key.object_group_id), key.cache_salt)
    return short("@".join(parts))


class _Submitted(NamedTuple):
    """The arguments of a task. The objects are kept while their memory is in use."""

    keys: list[Any]
    objects: list[Any]
    sizes: list[int]


@dataclass
class _Tasks:
    """Tasks of one kind: the outcome for each key of ended ones, until it is asked for.

    ``event_fd`` is -1 once they are closed: another file may have its number then.
    """

    event_fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    ended: dict[int, list[bool]] = field(default_factory=dict)

    def end(self, task: int, outcome: list[bool]) -> None:
        """Note the outcome of a task, and wake its waiter. Does nothing if they are closed."""
        if self.event_fd >= 0:
            self.ended[task] = outcome
            os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        """Close the event fd."""
        closed, self.event_fd = self.event_fd, -1
        os.close(closed)


class AioDataDistL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """An adapter whose objects are values of a :class:`~aiodatadist.context_caching.ContextCache`.

    They are checked when they are read, and shared by all processes that have the same pool and namespace. Any thread
    may call; only :meth:`close` waits. A pool that is slow or down finds nothing and stores nothing. A lock is a lease
    that ends by itself, if the pool has leases.

    Raises:
        EmsException: if the pool's URL is wrong, or its extra is not installed.
    """

    def __init__(self, config: AioDataDistL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._settings = config.settings
        self._service = ValueService(config.settings)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stores, self._lookups, self._loads = _Tasks(), _Tasks(), _Tasks()
        self._submitted: dict[int, _Submitted] = {}
        self._is_closed = False

    # ---- event fds ----

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    # ---- storing ----

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        buffers = self._buffers(keys, objects)
        task = next(self._numbers)
        self._submitted[task] = _Submitted(list(keys), list(objects), [len(buffer) for buffer in buffers])
        self._service.save([name_of(key) for key in keys], buffers, self._done(self._stores, task))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            ended, self._stores.ended = self._stores.ended, {}
        return {task: self._stored(task, outcome) for task, outcome in ended.items()}

    def _stored(self, task: int, outcome: list[bool]) -> L2StoreResult:
        keys, _, sizes = self._submitted.pop(task)
        kept = [(key, size) for key, size, is_kept in zip(keys, sizes, outcome, strict=True) if is_kept]
        if kept:
            self._notify_keys_stored([key for key, _ in kept], [size for _, size in kept])
        return L2StoreResult(len(kept) == len(keys), sum(size for _, size in kept))

    # ---- looking up ----

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        task = next(self._numbers)
        self._service.look_up([name_of(key) for key in keys], self._done(self._lookups, task))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._query(self._lookups, task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: a lease ends by itself."""

    # ---- loading ----

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        buffers = self._buffers(keys, objects)
        task = next(self._numbers)
        self._submitted[task] = _Submitted(list(keys), list(objects), [])
        self._service.load([name_of(key) for key in keys], buffers, self._done(self._loads, task))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        found = self._query(self._loads, task_id)
        if found is not None:
            keys = self._submitted.pop(task_id).keys
            self._notify_keys_accessed([keys[i] for i in found.get_indices_list()])
        return found

    # ---- the rest ----

    def delete(self, keys: list[Any]) -> None:
        """Start to remove values. The pool does not say how many bytes that frees."""
        self._service.remove([name_of(key) for key in keys], lambda _: self._notify_keys_deleted(keys, [0] * len(keys)))

    def report_status(self) -> dict[str, Any]:
        """Return health and pool. May wait for a second."""
        return {"is_healthy": not self._is_closed and self._service.check_health(), "pool": self._settings.pool}

    def close(self) -> None:
        """Wait for the end of all tasks; their memory is not touched afterwards. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._service.close()
            with self._lock:  # a task that another thread was starting may end now
                for tasks in (self._stores, self._lookups, self._loads):
                    tasks.close()

    # ---- tasks ----

    @staticmethod
    def _buffers(keys: Sequence[Any], objects: Sequence[Any]) -> list[memoryview]:
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys for {len(objects)} objects: the numbers must be equal")
        return [bytes_of(each) for each in objects]

    def _done(self, tasks: _Tasks, task: int) -> Any:
        def done(outcome: list[bool]) -> None:
            with self._lock:
                tasks.end(task, outcome)

        return done

    def _query(self, tasks: _Tasks, task: int) -> Bitmap | None:
        with self._lock:
            outcome = tasks.ended.pop(task, None)
        if outcome is None:
            return None
        found = Bitmap(len(outcome))
        for i, is_there in enumerate(outcome):
            if is_there:
                found.set(i)
        return found
