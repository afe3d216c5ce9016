"""LMCache's remote backend: values with their own header, which has their shape."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Callable
from concurrent.futures import Future
from math import prod
from typing import Any

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from pydantic import ValidationError

from aiodatadist._adapters.lmcache.buffers import bytes_of
from aiodatadist._adapters.value_service import ValueService, ValueSettings, short
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable

logger = logging.getLogger(__name__)

PREFIX = "aiodatadist."
"""Prefix of this connector's settings in LMCache's ``extra_config``."""


def settings_of(config: Any) -> ValueSettings:
    """Return the settings. Raises ValueError if one is wrong."""
    extra = config.extra_config or {}
    given = {name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)}
    try:
        return ValueSettings.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"extra_config, {PREFIX}*: {error}") from None


class AioDataDistRemoteConnector(RemoteConnector):  # type: ignore[misc]  # LMCache has no types here
    """A connector whose chunks are values of a :class:`~aiodatadist.context_caching.ContextCache`.

    Calls are awaited on LMCache's loop, and carried out on aiodatadist's. A pool that is slow or down causes misses.

    Raises:
        ValueError: if a setting is wrong.
        EmsException: if the pool's URL is wrong, or its extra is not installed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(config, local_cpu_backend.metadata)
        self._allocator = local_cpu_backend
        self._service = ValueService(settings_of(config))
        self._incidents = Incidents()

    # ---- what is there ----

    async def exists(self, key: Any) -> bool:
        return (await self._ask(self._service.look_up, [_header(key)]))[0]

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: builtins.list[Any]) -> int:
        """Return how many keys are there, from the first without a gap. Waits."""
        found: Future[list[bool]] = Future()
        self._service.look_up([_header(key) for key in keys], found.set_result)
        return _prefix(found.result())

    def support_batched_async_contains(self) -> bool:
        return True

    async def batched_async_contains(self, lookup_id: str, keys: builtins.list[Any], pin: bool = False) -> int:
        return _prefix(await self._ask(self._service.look_up, [_header(key) for key in keys]))

    # ---- reading ----

    async def get(self, key: Any) -> Any | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: builtins.list[Any]) -> builtins.list[Any | None]:
        """Return new memory objects; None if a chunk is missing or there is no memory for it."""
        headers = [bytearray(self.remote_metadata_bytes) for _ in keys]
        known = await self._ask(self._service.load, [_header(key) for key in keys], headers)
        objects = [
            self._allocate(header) if is_known else None for header, is_known in zip(headers, known, strict=True)
        ]
        wanted = [(i, made) for i, made in enumerate(objects) if made is not None]
        try:
            here = await self._ask(
                self._service.load, [_body(keys[i]) for i, _ in wanted], [bytes_of(made) for _, made in wanted]
            )
        except BaseException:
            for _, made in wanted:
                made.ref_count_down()
            raise
        for (i, made), is_here in zip(wanted, here, strict=True):
            if not is_here:
                made.ref_count_down()
                objects[i] = None
        return objects

    def _allocate(self, header: bytearray) -> Any | None:
        """Allocate memory of the shape in a header; return None if the header has none, or there is no room.

        Another writer of the pool may have written the header. LMCache evicts chunks, and waits for ever, until there is
        room for a shape: so one of more bytes than a chunk can have is refused before.
        """
        try:
            told = RemoteMetadata.deserialize(bytes(header))
            nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(told.shapes, told.dtypes, strict=True))
            if not 0 < nbytes == told.length <= self.full_chunk_size_bytes or min(map(min, told.shapes)) < 0:
                raise ValueError(f"{told.length} bytes of shape {told.shapes}")
            made = self._allocator.allocate(told.shapes, told.dtypes, told.fmt)
        except (ValueError, KeyError) as error:
            told = "a chunk's header is unreadable: %s", printable(error)
            self._incidents.add(Incident.VALUE_DAMAGED, logger, *told)
            return None
        if made is not None and len(bytes_of(made)) != told.length:
            made.ref_count_down()
            return None
        return made

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: builtins.list[Any]) -> builtins.list[Any]:
        """Return the objects in front of the first that is missing."""
        objects = await self.batched_get(keys)
        count = _prefix([each is not None for each in objects])
        for each in objects[count:]:
            if each is not None:
                each.ref_count_down()
        return objects[:count]

    # ---- writing ----

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: builtins.list[Any], memory_objs: builtins.list[Any]) -> None:
        """Store chunks, bodies first: a header means that its body is there."""
        bodies = await self._ask(self._service.save, [_body(key) for key in keys], [bytes_of(m) for m in memory_objs])
        stored = [(key, made) for key, made, there in zip(keys, memory_objs, bodies, strict=True) if there]
        headers = [bytearray(self._header_of(made)) for _, made in stored]
        await self._ask(self._service.save, [_header(key) for key, _ in stored], headers)

    @staticmethod
    def _header_of(made: Any) -> bytes:
        told = RemoteMetadata(len(bytes_of(made)), made.get_shapes(), made.get_dtypes(), made.get_memory_format())
        return bytes(told.serialize())

    def remove_sync(self, key: Any) -> bool:
        """Remove a chunk; return True if both of its values were removed. Waits."""
        removed: Future[list[bool]] = Future()
        self._service.remove([_header(key), _body(key)], removed.set_result)
        return all(removed.result())

    # ---- the rest ----

    async def list(self) -> builtins.list[str]:
        """Return nothing: pools do not list the names of their values."""
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """Return 0 if the pool works."""
        return 0 if await asyncio.to_thread(self._service.check_health) else 1

    async def close(self) -> None:
        await asyncio.to_thread(self._service.close)

    async def _ask(self, call: Callable[..., None], keys: builtins.list[str], *words: Any) -> builtins.list[bool]:
        """Make a call on the caller's loop. If cancelled, it still waits: memory is in use until the call has ended."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[bool]] = loop.create_future()

        def done(outcome: list[bool]) -> None:
            try:
                loop.call_soon_threadsafe(answer.set_result, outcome)
            except RuntimeError:
                logger.debug("the loop that asked has been closed")

        call(keys, *words, done)
        interruption: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError as error:
                interruption = error
        if interruption is not None:
            raise interruption
        return answer.result()


def _header(key: Any) -> str:
    return short(f"{key.to_string()} header")


def _body(key: Any) -> str:
    return short(f"{key.to_string()} body")


def _prefix(found: list[bool]) -> int:
    return found.index(False) if False in found else len(found)
