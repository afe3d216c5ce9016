"""SGLang's base classes over pushes: rooms, pages, and what goes with a request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodatadist import LLMException, ParamInvalid, TransferError
from aiodatadist._adapters import rendezvous
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.engines import sglang_base

FOLDER = sglang_base.sources()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs SGLang's files: make sglang")
ROOT = Path(__file__).resolve().parents[2]
PAGES, PAGE, TENSORS = 32, 2048, 4
ITEMS = (64, 8, 8)
"""Bytes of what goes with a request."""
FAST = {"heartbeat_interval": 0.1, "link_seconds": 5, "pull_seconds": 20, "lease_seconds": 20}


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """Load the base classes, and ours over them."""
    assert FOLDER is not None
    sglang_base.stand_in(FOLDER)
    base, ours = import_module("sglang.srt.disaggregation.base.conn"), import_module("aiodatadist.adapters.sglang")
    return SimpleNamespace(base=base, ours=ours, poll=base.KVPoll)


class Rank:
    """A rank of an engine: memory by address, as SGLang gives it. Page ``p`` of engine ``n`` holds ``40 * n + p``."""

    def __init__(
        self, number: int, mode: str, port: int, ranks: int = 1, is_latent: bool = False, **changes: Any
    ) -> None:
        self.pages = [np.zeros((PAGES, PAGE), np.uint8) for _ in range(TENSORS)]
        self.items = [np.zeros((PAGES, nbytes), np.uint8) for nbytes in ITEMS]
        for array in [*self.pages, *self.items]:
            array[:] = (40 * number + np.arange(PAGES))[:, None]
        arguments = SimpleNamespace(
            engine_rank=0, gpu_id=number, page_size=16, kv_cache_dtype_str="float16", state_types=[], state_data_ptrs=[],
            kv_data_ptrs=[a.ctypes.data for a in self.pages], kv_data_lens=[a.nbytes for a in self.pages],
            kv_item_lens=[PAGE] * TENSORS, aux_data_ptrs=[a.ctypes.data for a in self.items],
            aux_data_lens=[a.nbytes for a in self.items], aux_item_lens=list(ITEMS),
        )  # fmt: skip
        for name, value in changes.items():
            setattr(arguments, name, value)
        server = SimpleNamespace(host="127.0.0.1", disaggregation_bootstrap_port=port, tp_size=ranks)
        adapter = import_module("aiodatadist.adapters.sglang")
        self.manager = adapter.AioDataDistKVManager(arguments, SimpleNamespace(value=mode), server, is_latent)

    def page(self, number: int) -> set[int]:
        return {int(value) for array in self.pages for value in np.unique(array[number])}

    def item(self, number: int) -> set[int]:
        return {int(value) for array in self.items for value in np.unique(array[number])}


def until(look: Callable[[], Any], wanted: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while (found := look()) != wanted:
        assert time.monotonic() < end, found
        time.sleep(0.001)


class Pair:
    """A prefill and a decode rank, and the prefill engine's bootstrap server."""

    def __init__(self, sglang: SimpleNamespace, stack: ExitStack) -> None:
        self._sglang = sglang
        self.server = sglang.ours.AioDataDistKVBootstrapServer("127.0.0.1", 0)
        stack.callback(self.server.close)
        self.address = f"127.0.0.1:{self.server.port}"
        self.prefill = Rank(0, "prefill", self.server.port)
        stack.callback(self.prefill.manager.teardown)
        self.decode = Rank(1, "decode", self.server.port)
        stack.callback(self.decode.manager.teardown)

    def sender(self, room: int) -> Any:
        return self._sglang.ours.AioDataDistKVSender(self.prefill.manager, self.address, room)

    def receiver(self, room: int) -> Any:
        return self._sglang.ours.AioDataDistKVReceiver(self.decode.manager, self.address, room)


@pytest.fixture
def pair(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("AIODATADIST_SGLANG", json.dumps(FAST))
    with ExitStack() as stack:
        yield Pair(sglang, stack)


def indices(*pages: int) -> Any:
    return np.array(pages, np.int32)


def test_the_base_classes_accept_ours(sglang: SimpleNamespace) -> None:
    base, ours = sglang.base, sglang.ours
    assert issubclass(ours.AioDataDistKVManager, base.BaseKVManager)
    assert issubclass(ours.AioDataDistKVSender, base.BaseKVSender)
    assert issubclass(ours.AioDataDistKVReceiver, base.BaseKVReceiver)
    assert issubclass(ours.AioDataDistKVBootstrapServer, base.BaseKVBootstrapServer)
    for each in (ours.AioDataDistKVManager, ours.AioDataDistKVSender, ours.AioDataDistKVReceiver):
        assert not each.__abstractmethods__


def test_a_room_in_several_chunks(sglang: SimpleNamespace, pair: Pair) -> None:
    poll = sglang.poll
    sender, receiver = pair.sender(7), pair.receiver(7)
    assert (sender.poll(), receiver.poll()) == (poll.Bootstrapping, poll.Bootstrapping)
    receiver.init(0)
    assert receiver.poll() == poll.WaitingForInput
    receiver.send_metadata(indices(4, 5, 6), 9)
    assert receiver.poll() == poll.Transferring
    sender.init(3, 11)
    until(sender.poll, poll.WaitingForInput)
    assert sender.should_send_kv_chunk(1, False)
    sender.send(indices(1, 2))
    assert sender.poll() == poll.Transferring
    until(lambda: pair.decode.page(5), {2})
    assert receiver.poll() == poll.Transferring
    sender.send(indices(30))
    until(sender.poll, poll.Success)
    until(receiver.poll, poll.Success)
    assert [pair.decode.page(page) for page in (4, 5, 6, 7)] == [{1}, {2}, {30}, {47}]
    assert [pair.decode.item(item) for item in (9, 10)] == [{11}, {50}]
    metric = sender.get_transfer_metric()
    assert metric.transfer_total_bytes == 3 * TENSORS * PAGE
    assert metric.transfer_latency_s > 0
    sender.clear()
    receiver.clear()


@pytest.mark.parametrize("is_latent", [True, False])
def test_prefill_ranks_that_have_the_same_pages(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, is_latent: bool
) -> None:
    """With latent attention one rank's pages are enough, and the other rank's room ends well, too."""
    monkeypatch.setenv("AIODATADIST_SGLANG", json.dumps(FAST))
    poll = sglang.poll
    with ExitStack() as stack:
        server = sglang.ours.AioDataDistKVBootstrapServer("127.0.0.1", 0)
        stack.callback(server.close)
        made = [Rank(n, "prefill", server.port, 2, is_latent, engine_rank=n, gpu_id=n) for n in range(2)]
        made.append(Rank(2, "decode", server.port, 1, is_latent))
        for each in made:
            stack.callback(each.manager.teardown)
        address, decode = f"127.0.0.1:{server.port}", made.pop()
        taken = set()
        for room in range(8):
            senders = [sglang.ours.AioDataDistKVSender(rank.manager, address, room) for rank in made]
            receiver = sglang.ours.AioDataDistKVReceiver(decode.manager, address, room)
            receiver.init(0)
            if not is_latent:
                assert receiver.poll() == poll.Failed
                with pytest.raises(TransferError, match="tensor_parallel_size is 1 here and 2"):
                    receiver.failure_exception()
                return
            receiver.send_metadata(indices(4, 5), 9)
            for sender in senders:
                sender.init(2, 11)
                sender.send(indices(1, 2))
            for each in (*senders, receiver):
                until(each.poll, poll.Success)
            (page,) = decode.page(4)
            assert (decode.page(5), decode.item(9)) == ({page + 1}, {page + 10})
            taken.add(page)
        assert taken == {1, 41}, "they take turns"


def test_chunks_that_come_before_the_metadata_and_a_prefix(sglang: SimpleNamespace, pair: Pair) -> None:
    sender, receiver = pair.sender(8), pair.receiver(8)
    sender.init(4, 3)
    sender.send(indices(1, 2, 3, 4))
    receiver.init(0)
    receiver.send_metadata(indices(10, 11), 2, decode_prefix_len=32)  # it has the first two pages
    until(receiver.poll, sglang.poll.Success)
    until(sender.poll, sglang.poll.Success)
    assert [pair.decode.page(page) for page in (10, 11, 12)] == [{3}, {4}, {52}]
    assert pair.decode.item(2) == {3}


def test_many_rooms(sglang: SimpleNamespace, pair: Pair) -> None:
    rooms = range(100, 160)
    ends = [(pair.sender(room), pair.receiver(room)) for room in rooms]
    for i, (sender, receiver) in enumerate(ends):
        page = i % PAGES
        sender.init(1, page)
        receiver.init(0)
        if i % 2:
            sender.send(indices(page))
            receiver.send_metadata(indices(page), page)
        else:
            receiver.send_metadata(indices(page), page)
            sender.send(indices(page))
    for sender, receiver in ends:
        until(sender.poll, sglang.poll.Success)
        until(receiver.poll, sglang.poll.Success)
    assert [pair.decode.page(page) for page in range(PAGES)] == [{page} for page in range(PAGES)]


def test_second_request_of_a_room_fails_and_its_pages_go_nowhere(sglang: SimpleNamespace, pair: Pair) -> None:
    poll = sglang.poll
    first, second = pair.sender(7), pair.sender(7)
    receiver, other = pair.receiver(7), pair.receiver(7)
    for sender, page in ((first, 1), (second, 5)):
        sender.init(2, page)
        sender.send(indices(page))
    until(second.poll, poll.Failed)
    first.send(indices(2))
    for each, page in ((receiver, 10), (other, 20)):
        each.init(0)
        each.send_metadata(indices(page, page + 1), page)
    until(other.poll, poll.Failed)
    until(receiver.poll, poll.Success)
    until(first.poll, poll.Success)
    assert [pair.decode.page(page) for page in (10, 11, 20, 21)] == [{1}, {2}, {60}, {61}]
    assert pair.decode.item(10) == {1}


def test_failure_of_one_room_does_not_disturb_another_that_waits_for_pages(sglang: SimpleNamespace, pair: Pair) -> None:
    failing, waiting = pair.receiver(1), pair.receiver(2)
    failing.init(0)
    waiting.init(0)
    failing.send_metadata(indices(4), 9)
    sender = pair.sender(1)
    sender.init(1, 1)
    sender.abort()
    until(failing.poll, sglang.poll.Failed)  # and the manager forgets where the ranks are
    waiting.send_metadata(indices(10), 9)
    sender = pair.sender(2)
    sender.init(1, 3)
    sender.send(indices(3))
    until(waiting.poll, sglang.poll.Success)


def test_finished_room_may_be_used_again(sglang: SimpleNamespace, pair: Pair) -> None:
    for page in (1, 2, 3):
        sender, receiver = pair.sender(7), pair.receiver(7)
        receiver.init(0)
        receiver.send_metadata(indices(10), 9)
        sender.init(1, page)
        sender.send(indices(page))
        until(sender.poll, sglang.poll.Success)
        until(receiver.poll, sglang.poll.Success)
        assert (pair.decode.page(10), pair.decode.item(9)) == ({page}, {page})


def test_room_that_was_given_up_may_be_used_again(sglang: SimpleNamespace, pair: Pair) -> None:
    """By either end first. The sender that gave up is cleared late."""
    for page in (1, 2, 3, 4):
        given_up, sender, receiver = pair.sender(7), pair.sender(7), pair.receiver(7)
        given_up.init(1, page)
        if page % 2:
            given_up.send(indices(30))
        given_up.abort()
        receiver.init(0)
        sender.init(1, page)
        if page > 2:
            sender.send(indices(page))
        receiver.send_metadata(indices(10), 9)
        if page <= 2:
            until(sender.poll, sglang.poll.WaitingForInput)
            given_up.clear()
            assert sender.poll() == sglang.poll.WaitingForInput
            sender.send(indices(page))
        until(sender.poll, sglang.poll.Success)
        until(receiver.poll, sglang.poll.Success)
        assert (pair.decode.page(10), pair.decode.item(9)) == ({page}, {page})
        assert given_up.poll() == sglang.poll.Failed


def test_abort_of_a_sender_that_has_ended_changes_nothing(sglang: SimpleNamespace, pair: Pair) -> None:
    sender, receiver = pair.sender(7), pair.receiver(7)
    receiver.init(0)
    receiver.send_metadata(indices(10), 9)
    sender.init(1, 1)
    sender.send(indices(1))
    until(receiver.poll, sglang.poll.Success)  # told by the sender's engine when the room had ended there
    sender.abort()
    assert sender.poll() == sglang.poll.Success


def test_aborts_at_either_end(sglang: SimpleNamespace, pair: Pair) -> None:
    failed = sglang.poll.Failed
    sender, receiver = pair.sender(1), pair.receiver(1)
    receiver.init(0)
    receiver.send_metadata(indices(4, 5), 9)
    sender.init(2, 1)
    sender.send(indices(1))
    until(lambda: pair.decode.page(4), {1})
    sender.abort()
    assert sender.poll() == failed
    until(receiver.poll, failed)
    with pytest.raises(Exception, match="room 1: it was aborted"):
        sender.failure_exception()
    with pytest.raises(Exception, match="room 1: push_missed"):
        receiver.failure_exception()
    sender, receiver = pair.sender(2), pair.receiver(2)
    receiver.init(0)
    receiver.send_metadata(indices(14, 15), 9)
    sender.init(2, 1)
    sender.send(indices(2))
    receiver.abort()
    until(receiver.is_abort_release_safe, True)
    assert receiver.poll() == failed
    before = pair.decode.page(15)
    sender.send(indices(3))
    until(sender.poll, failed)
    assert pair.decode.page(15) == before == {55}
    receiver = pair.receiver(3)
    receiver.abort()
    assert receiver.poll() == failed


def test_a_transfer_that_fails(sglang: SimpleNamespace, pair: Pair) -> None:
    sender, receiver = pair.sender(1), pair.receiver(1)
    receiver.init(0)
    receiver.send_metadata(indices(4), 9)
    with soft_faults_cleared():
        soft_fault("HcclBatchPut:exec=507053")
        sender.init(1, 1)
        sender.send(indices(1))
        until(sender.poll, sglang.poll.Failed)
        until(receiver.poll, sglang.poll.Failed)


def test_no_decode_engine_asks(sglang: SimpleNamespace, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pair.prefill.manager, "settings", pair.prefill.manager.settings.model_copy(update={"bootstrap_seconds": 0.05})
    )
    sender = pair.sender(1)
    sender.init(1, 1)
    until(sender.poll, sglang.poll.Failed)
    with pytest.raises(Exception, match=r"no decode engine asked within 0\.05 s"):
        sender.failure_exception()


def test_a_second_engine_does_not_replace_the_first(sglang: SimpleNamespace, pair: Pair) -> None:
    with pytest.raises(LLMException, match=r"rank 0 is cluster [0-9]+, whose address still answers"):
        Rank(2, "prefill", pair.server.port)
    until(lambda: pair.decode.manager.try_ensure_parallel_info(pair.address), True)
    (worker,) = pair.decode.manager.prefill_info_table[pair.address].workers
    assert worker == pair.prefill.manager.address


def test_the_key_is_that_of_the_settings(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in "key", "other":
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(name[:1].encode() * 32)
    monkeypatch.setenv("AIODATADIST_SGLANG", json.dumps({**FAST, "auth_key_file": str(tmp_path / "key")}))
    with ExitStack() as stack:
        pair = Pair(sglang, stack)
        until(lambda: pair.decode.manager.try_ensure_parallel_info(pair.address), True)
        monkeypatch.setenv("AIODATADIST_SGLANG", json.dumps({**FAST, "auth_key_file": str(tmp_path / "other")}))
        other = Rank(2, "decode", pair.server.port)
        stack.callback(other.manager.teardown)
        assert not other.manager.find_ranks(pair.address, 30)
        with pytest.raises(LLMException, match="its seal is of another key"):
            Rank(3, "prefill", pair.server.port)
    monkeypatch.setenv("AIODATADIST_SGLANG", "{}")
    with pytest.raises(ParamInvalid, match="what is not a loopback address needs auth_key or trust"):
        sglang.ours.AioDataDistKVBootstrapServer("0.0.0.0", 0)


@pytest.mark.parametrize(
    "place", ["127.0.0.1:None", "127.0.0.1", ":", "127.0.0.1:99999", "\x1b[2J\n:1", "a" * 9999 + ":1"]
)
def test_a_request_names_no_bootstrap_server(
    sglang: SimpleNamespace, pair: Pair, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = sglang.ours.AioDataDistKVReceiver(pair.decode.manager, place, 1)
    receiver.init(0)
    assert receiver.poll() == sglang.poll.Failed
    (told,) = [each.getMessage() for each in caplog.records if "bootstrap server" in each.getMessage()]
    assert told.isascii()
    assert told.isprintable()
    assert len(told) < 700


def test_a_bootstrap_server_that_is_none_of_peers_is_not_asked(
    sglang: SimpleNamespace, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(rendezvous, "ask", lambda *arguments: asked.append(arguments))
    pair.decode.manager.incidents.clock = count(0.0, 1.0).__next__  # each question is in a second of its own
    for place in ("10.9.9.9:22", "metadata.internal:80"):
        assert not pair.decode.manager.try_ensure_parallel_info(place)
    assert asked == []
    assert caplog.text.count("is not in peers") == 2


def test_the_spellings_of_one_address_are_not_kept_without_limit(
    sglang: SimpleNamespace, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._adapters.sglang.manager.MAX_ENGINES", 4)
    host, _, port = pair.address.rpartition(":")
    for zeros in range(6):
        assert pair.decode.manager.find_ranks(f"{host}:{'0' * zeros}{port}", 30)
    assert list(pair.decode.manager.prefill_info_table) == [f"{host}:{'0' * zeros}{port}" for zeros in range(2, 6)]


@pytest.mark.parametrize("room", ["r" * 257, 10**5000], ids=["characters", "digits"])
def test_a_room_that_is_too_long_fails_at_both_ends(sglang: SimpleNamespace, pair: Pair, room: Any) -> None:
    for end in (pair.receiver(room), pair.sender(room)):
        assert end.poll() == sglang.poll.Failed
        with pytest.raises(Exception, match=r"limit"):
            end.failure_exception()
        end.abort()
        end.clear()


def test_a_layout_is_short_whatever_the_model_is(sglang: SimpleNamespace) -> None:
    layout_of = import_module("aiodatadist._adapters.sglang.buffers").layout_of

    def lengths(of: list[int]) -> str:
        arguments = SimpleNamespace(page_size=16, kv_item_lens=of, aux_item_lens=[64])
        return str(layout_of(arguments, 1)["kv_item_lens"])

    assert lengths([2048] * 160 + [64]) == "2048x160,64"
    assert lengths([2048, 64, 64]) == "2048,64x2"
    mixed = [2048, 4096] * 80
    assert len(lengths(mixed)) <= 64
    assert lengths(mixed) == lengths(mixed) != lengths([*mixed[:-1], 4097])


def test_engines_that_do_not_fit_name_both_values(sglang: SimpleNamespace, pair: Pair) -> None:
    other = Rank(2, "decode", pair.server.port, page_size=32)
    try:
        receiver = sglang.ours.AioDataDistKVReceiver(other.manager, pair.address, 1)
        receiver.init(0)  # which SGLang's scheduler calls: an error would end it
        assert receiver.poll() == sglang.poll.Failed
        with pytest.raises(Exception, match=f"page_size is 32 here and 16 at the engine of {pair.address}"):
            receiver.failure_exception()
    finally:
        other.manager.teardown()


def test_a_request_for_an_engine_that_does_not_fit_leaves_the_scheduler_alone(
    sglang: SimpleNamespace, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    other = Rank(2, "decode", pair.server.port, page_size=32)
    try:
        words = f"page_size is 32 here and 16 at the engine of {pair.address}"
        until(lambda: other.manager.try_ensure_parallel_info(pair.address) or words in caplog.text, True)
        assert pair.address not in other.manager.prefill_info_table
    finally:
        other.manager.teardown()


def test_what_cannot_be(sglang: SimpleNamespace, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in (
        ({"state_data_ptrs": [[1]], "state_types": ["mamba"]}, r"state beside its KV cache \(mamba\)"),
        ({"kv_item_lens": [PAGE - 1] * TENSORS}, "a whole number of items of 2047 bytes"),
        ({"kv_item_lens": [PAGE]}, "4 addresses, 4 lengths and 1 item lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            Rank(2, "decode", pair.server.port, **changes)
    receiver = sglang.ours.AioDataDistKVReceiver(pair.decode.manager, "127.0.0.1:1", 1)
    receiver.init(0)
    assert receiver.poll() == sglang.poll.Failed
    receiver, sender = pair.receiver(2), pair.sender(2)
    receiver.init(0)
    with pytest.raises(ValueError, match="decode_prefix_len is 5"):
        receiver.send_metadata(indices(1), 1, decode_prefix_len=5)
    with pytest.raises(ValueError, match="moves no state"):
        receiver.send_metadata(indices(1), 1, [indices(1)])
    with pytest.raises(ValueError, match="device memory"):
        receiver.send_metadata(indices(1), 1, destination=sglang.base.KVTransferDestination.HOST)
    sender.init(1)
    with pytest.raises(ValueError, match="2 pages: 1 were announced"):
        sender.send(indices(1, 2))
    monkeypatch.setenv("AIODATADIST_SGLANG", '{"prot": 1}')
    with pytest.raises(ValueError, match="AIODATADIST_SGLANG"):
        Rank(2, "decode", pair.server.port)


PREFILL = """
import json, sys
from tests.engines import sglang_base, test_sglang
sglang_base.stand_in(sglang_base.sources())
from aiodatadist.adapters.sglang import AioDataDistKVSender
rank = test_sglang.Rank(0, "prefill", int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    room, pages = json.loads(line)
    sender = AioDataDistKVSender(rank.manager, "", room)
    sender.init(len(pages) + (room == 99), 1)
    sender.send(test_sglang.indices(*pages))
"""


def test_a_prefill_process_that_is_killed(sglang: SimpleNamespace, pair: Pair) -> None:
    """Two processes. The next one, at the same bootstrap server, is found once the one before no longer answers."""
    pair.prefill.manager.teardown()
    for room in (98, 99):
        with subprocess.Popen(
            [sys.executable, "-c", PREFILL, str(pair.server.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ},
        ) as process:  # fmt: skip
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                pair.decode.manager.forget_prefill(pair.address)
                receiver = pair.receiver(room)
                receiver.init(0)
                receiver.send_metadata(indices(room - 90, 3), 2)
                print(json.dumps([room, [5, 6] if room == 98 else [5]]), file=process.stdin, flush=True)
                until(lambda: pair.decode.page(room - 90), {5})  # noqa: B023
                if room == 98:
                    until(receiver.poll, sglang.poll.Success)
                    continue
                assert receiver.poll() == sglang.poll.Transferring
                process.send_signal(signal.SIGKILL)
                until(receiver.poll, sglang.poll.Failed)
            finally:
                process.kill()


def test_they_take_the_place_of_a_backend(sglang: SimpleNamespace) -> None:
    assert FOLDER is not None
    utils, imported = sglang_base.choosing(FOLDER), ModuleType("sglang.srt.disaggregation.made_up")
    imported.get_kv_class = utils.get_kv_class  # type: ignore[attr-defined]
    sys.modules[imported.__name__] = imported
    try:
        for _ in range(2):
            sglang.ours.register("nixl", utils)
        for module in (utils, imported):
            kinds, nixl = utils.KVClassType, utils.TransferBackend("nixl")
            assert module.get_kv_class(nixl, kinds.MANAGER) is sglang.ours.AioDataDistKVManager
            assert module.get_kv_class(nixl, kinds.SENDER) is sglang.ours.AioDataDistKVSender
            assert module.get_kv_class(nixl, kinds.RECEIVER) is sglang.ours.AioDataDistKVReceiver
            assert module.get_kv_class(nixl, kinds.BOOTSTRAP_SERVER) is sglang.ours.AioDataDistKVBootstrapServer
            assert module.get_kv_class(nixl, kinds.KVARGS) is sglang.base.KVArgs
    finally:
        del sys.modules[imported.__name__]
    with pytest.raises(ValueError, match="carrier pigeon"):
        sglang.ours.register("carrier pigeon", utils)
    with pytest.raises(RuntimeError, match=r"0\.5\.23"):
        sglang.ours.register("nixl", ModuleType("sglang.other"))
