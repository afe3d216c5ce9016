"""LMCache's second-level storage, without LMCache: what a thread may still do while another one closes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace

import pytest

from aiodatadist._adapters.value_service import ValueService, ValueSettings
from tests.hostile.vllm_names import lmcache_adapter

KEY = SimpleNamespace(model_name="m", kv_rank=0, chunk_hash=b"h", object_group_id=0, cache_salt="")


@pytest.fixture
def module() -> Iterator[ModuleType]:
    with lmcache_adapter() as found:
        yield found


def test_a_call_that_ends_after_the_adapter_was_closed_writes_to_no_other_file(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the adapter while a call is on its way to the loop, which answers it then."""
    answers: list[Callable[[list[bool]], object]] = []

    def look_up(_: ValueService, keys: Sequence[str], done: Callable[[list[bool]], object]) -> None:
        answers.append(done)

    monkeypatch.setattr(ValueService, "look_up", look_up)
    adapter = module.AioDataDistL2Adapter(module.AioDataDistL2AdapterConfig(ValueSettings(pool="memory:?bytes=4MiB")))
    files = adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()
    adapter.submit_lookup_and_lock_task([KEY], {})
    adapter.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    again = [fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, number) for number in files]
    try:
        assert set(again) | {other} >= set(files), "the numbers are used again"
        answers[0]([False])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        for each in (other, *again):
            os.close(each)
    adapter.close()
