"""Offers that a router or a client has changed, as two engines' block services and vLLM's scheduler see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodatadist import new_lease_name, prompt_digest
from aiodatadist._adapters.pull_orders import KeptOrder, WorkerAddress
from aiodatadist._adapters.regions import Heads, Memory
from aiodatadist._adapters.settings import Settings
from tests.adapters.kv_memory import Order, opaque, opaque_memory
from tests.adapters.test_block_service import BLOCKS, BYTES, LAYOUT, PROMPT, End, order
from tests.hostile.vllm_names import both_halves

ANOTHER = prompt_digest([1, 2, 4])
SIZE = 16
"""Tokens of a block."""


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        made = [End(n, Settings(link_seconds=5, patience_seconds=2), LAYOUT) for n in range(2)]
        for each in made:
            stack.enter_context(closing(each.service))
        yield made[0], made[1]


FORGED: dict[str, dict[str, Any]] = {
    "other blocks": {"blocks": (4, 5)},
    "more blocks": {"blocks": (3, 9, 4), "into": (0, 1, 2)},
    "fewer blocks": {"blocks": (9,), "into": (1,)},
    "another order": {"blocks": (9, 3)},
    "another block in front": {"blocks": (4, 3, 9), "first": 1},
    "another prompt": {"prompt_digest": ANOTHER},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_order_uses_nothing_and_leaves_the_lease(ends: tuple[End, End], kind: str) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    forged = order("forged", lease, owner.address, **FORGED[kind])
    puller.service.pull(forged)
    ended = puller.until("received", "forged")
    assert ended.failed == {"forged": forged.into}
    assert ended.counters == {"pull_refused": 1}
    puller.service.pull(order("true", lease, owner.address, into=(6, 7)))
    assert puller.until("received", "true").failed == {}
    assert (puller.holds(6), puller.holds(7)) == ({3}, {9})
    assert owner.until("sent", "r").counters == {"lease_taken": 1, "claims_refused": 1}


ORDER: Order = ("heads", "tokens", 128)
TWO = Heads(0, 2, 2)


def said(order: Order = ORDER, tokens: int = 16, heads: Heads = TWO, copies: int = 2) -> Memory:
    """Return what a worker says that has two tensors of such blocks."""
    layers = [[np.zeros((BLOCKS, BYTES), np.uint8)] for _ in range(copies)]
    return opaque(layers, BLOCKS, tokens, order, (heads,)).memory


PLACES: dict[str, dict[str, Any]] = {
    "the layout of the puller": {"layout": {**LAYOUT, "dtype": "float16"}},
    "a layout with more": {"layout": {**LAYOUT, "tensor_parallel_size": 1}},
    "another order of axes": {"memory": said(("tokens", "heads", 128))},
    "another number of tokens": {"memory": said(("heads", "tokens", 64), 32)},
    "other heads": {"memory": said(heads=Heads(0, 2, 4))},
}


@pytest.mark.parametrize("kind", PLACES)
def test_an_order_that_says_otherwise_how_blocks_are_made_up_uses_nothing(kind: str) -> None:
    """The right bytes would come into the wrong places, and count as the prompt's."""
    settings = Settings(link_seconds=5, patience_seconds=2)
    layout = PLACES[kind].get("layout", LAYOUT)
    memory = PLACES[kind].get("memory", said()).regions[0]
    named = {axis: size for axis, size, _ in memory.axes}
    order_here = tuple(axis if axis != "part" else size for axis, size, _ in memory.axes)
    owner = End(0, settings, LAYOUT, ORDER, (TWO,))
    puller = End(1, settings, layout, order_here, (Heads(*memory.heads),), named["tokens"])
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        forged = WorkerAddress.model_validate({**owner.address.model_dump(), **PLACES[kind]})
        puller.service.pull(order("forged", lease, forged))
        ended = puller.until("received", "forged")
        assert (ended.failed, ended.counters) == ({"forged": (0, 1)}, {"pull_refused": 1})
        puller.service.release(KeptOrder("released", (forged,), lease, (3, 9), PROMPT))
        true = End(2, settings, LAYOUT, ORDER, (TWO,))
        with closing(true.service):
            true.service.pull(order("true", lease, owner.address))
            assert true.until("received", "true").failed == {}
        assert owner.until("sent", "r").counters == {"lease_taken": 1, "claims_refused": 1}


@pytest.mark.parametrize("copies", [2, 4])
def test_a_worker_that_is_named_several_times_gives_nothing(copies: int) -> None:
    """Name a worker several times, as if each copy had a share of the model's heads."""
    settings = Settings(link_seconds=5, patience_seconds=2)
    owner, puller = (End(number, settings, LAYOUT, ORDER, (TWO,)) for number in range(2))
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("forged", lease, owner.address, sources=(owner.address,) * copies))
        ended = puller.until("received", "forged")
        assert (ended.failed, ended.counters) == ({"forged": (0, 1)}, {"pull_refused": 1})
        true = End(2, settings, LAYOUT, ORDER, (TWO,))
        with closing(true.service):
            true.service.pull(order("true", lease, owner.address))
            assert true.until("received", "true").failed == {}
        assert owner.until("sent", "r").counters["claims_refused"] == 1


def test_blocks_of_one_s_own_lease_that_are_here_already_are_left_out(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9, 4], PROMPT)
    puller.service.pull(order("r", lease, owner.address, blocks=(3, 9, 4), first=1))
    assert puller.until("received", "r").failed == {}
    assert (puller.holds(0), puller.holds(1)) == ({9}, {4})


def test_a_forged_release_leaves_the_lease(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    for blocks, prompt in (((4, 5), PROMPT), ((3, 9), ANOTHER), ((), PROMPT)):
        puller.service.release(
            KeptOrder("released", (owner.address,), lease, blocks, prompt)
        )  # one of them before the lease
    owner.service.keep("r", lease, [3, 9], PROMPT)
    for blocks, prompt in (((4, 5), PROMPT), ((3, 9), ANOTHER)):
        puller.service.release(KeptOrder("released", (owner.address,), lease, blocks, prompt))
    puller.service.pull(order("r", lease, owner.address))
    assert puller.until("received", "r").failed == {}
    assert owner.until("sent", "r").counters == {"lease_taken": 1}


def test_a_cancelled_pull_of_another_prompt_leaves_the_lease(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    for number in range(20):
        puller.service.pull(order(f"r{number}", lease, owner.address, prompt_digest=ANOTHER))
        puller.service.cancel(f"r{number}")
        puller.until("received", f"r{number}")
    puller.service.pull(order("r", lease, owner.address))
    assert puller.until("received", "r").failed == {}
    ended = owner.until("sent", "r")
    assert (ended.counters["lease_taken"], ended.counters["lease_released"]) == (1, 0)


# ---- what vLLM's scheduler orders, and what it keeps ----


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as halves:
        yield halves


TOKENS = list(range(100, 140))
CLUSTERS = count(7)
WORKER = {
    "cluster_id": 7,
    "host": "127.0.0.1",
    "port": 26000,
    "cache_ids": [1],
    "layout": dict(LAYOUT),
    "memory": json.loads(opaque_memory().model_dump_json()),
}


def image(name: str, offset: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))


def request(vllm: SimpleNamespace, name: str, tokens: list[int], params: dict[str, Any], **changes: Any) -> Any:
    """Return a request that was computed whole."""
    values = {
        "request_id": name, "kv_transfer_params": params, "num_prompt_tokens": len(tokens),
        "num_computed_tokens": len(tokens), "prompt_token_ids": tokens, "lora_request": None, "cache_salt": None,
        "mm_features": [], "prompt_embeds": None, "status": vllm.scheduler_side.RequestStatus.FINISHED_LENGTH_CAPPED,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


class Engine:
    """A scheduler's half with a KV cache of so many blocks."""

    def __init__(self, vllm: SimpleNamespace, blocks: int = 100, **settings: Any) -> None:
        self.vllm = vllm
        self.side = vllm.scheduler_side.SchedulerSide(Settings(**settings), SIZE, blocks)
        self.worker = {**WORKER, "cluster_id": next(CLUSTERS)}
        self.side.meet({0: WorkerAddress.model_validate(self.worker)})

    def orders(self) -> Any:
        none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
        return self.side.take_orders(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=none))

    def prefill(self, name: str, tokens: list[int], blocks: list[int], **changes: Any) -> Any:
        """Prefill a prompt and return the offer for the next engine."""
        params = {"do_remote_decode": True, **changes.pop("params", {})}
        is_kept, offer = self.side.finished(request(self.vllm, name, tokens, params, **changes), blocks)
        assert is_kept == (offer is not None)
        return offer

    def decode(self, name: str, tokens: list[int], offer: Any, cached: int = 0, **changes: Any) -> Any:
        """Accept an offer and return the order to pull."""
        made = request(self.vllm, name, tokens, dict(offer), **changes)
        count, is_async = self.side.matched_tokens(made, cached)
        assert is_async == (count > 0)
        self.side.allocated(made, list(range(50, 50 + -(-len(tokens) // SIZE))), count)
        (load,) = self.orders().loads
        return load


def test_both_engines_have_the_same_digest_of_the_same_prompt(vllm: SimpleNamespace) -> None:
    prefill, decode = Engine(vllm), Engine(vllm)
    lora = SimpleNamespace(lora_name="adapter")
    rich = {"lora_request": lora, "cache_salt": "tenant", "mm_features": [image("a", 3), image("b", 20)]}
    for number, changes in enumerate(({}, rich)):
        offer = prefill.prefill(f"p{number}", TOKENS, [1, 2, 3], **changes)
        (keep,) = prefill.orders().keeps
        for cached in (0, SIZE, 20):
            load = decode.decode(f"d{number}-{cached}", TOKENS, offer, cached, **changes)
            assert load.prompt_digest == keep.prompt_digest
            assert (load.first, load.skip, load.tokens) == (cached // SIZE, cached % SIZE, 40 - cached)
            assert load.offer.remote_block_ids == keep.blocks == (1, 2, 3)
    assert keep.prompt_digest == prompt_digest(TOKENS, lora="adapter", salt="tenant", images=["a", "b"])


def test_an_engine_that_answered_some_tokens_offers_its_prompt(vllm: SimpleNamespace) -> None:
    """The next engine may know the prompt only, or what was answered as well."""
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = prefill.prefill("p", TOKENS, [1, 2, 3, 4], num_computed_tokens=60)
    assert offer is not None
    (keep,) = prefill.orders().keeps
    assert (keep.blocks, offer["remote_num_tokens"]) == ((1, 2, 3), 40)
    for tokens in (TOKENS, [*TOKENS, 7, 8]):
        assert decode.decode(f"d{len(tokens)}", tokens, offer).prompt_digest == keep.prompt_digest


DIFFERENT: dict[str, dict[str, Any]] = {
    "the last token": {"tokens": [*TOKENS[:-1], 7]},
    "the first token": {"tokens": [7, *TOKENS[1:]]},
    "a shorter prompt": {"tokens": TOKENS[:-1]},
    "an adapter": {"lora_request": SimpleNamespace(lora_name="another")},
    "a salt": {"cache_salt": "another"},
    "an image": {"mm_features": [image("another", 3)]},
    "a further image": {"mm_features": [image("a", 3), image("a", 20)]},
    "fewer tokens said": {"offer": {"remote_num_tokens": 39}},
    "more tokens said": {"tokens": [*TOKENS, *range(8)], "offer": {"remote_num_tokens": 48}},
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_another_prompt_has_another_digest(vllm: SimpleNamespace, kind: str) -> None:
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = prefill.prefill("p", TOKENS, [1, 2, 3], mm_features=[image("a", 3)])
    (keep,) = prefill.orders().keeps
    changes = {"tokens": TOKENS, "mm_features": [image("a", 3)], **DIFFERENT[kind]}
    load = decode.decode("d", changes.pop("tokens"), {**offer, **changes.pop("offer", {})}, **changes)
    assert load.prompt_digest != keep.prompt_digest


@pytest.mark.parametrize("changed", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_of_one_name_and_other_weights_has_another_digest(
    vllm: SimpleNamespace, tmp_path: Path, changed: str
) -> None:
    """An engine that has an update of the adapter gets nothing from one that has not, wherever their folders are."""
    loras = []
    for name in ("old", "copy", "new"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes(4096))
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "path": name}))
        loras.append(SimpleNamespace(lora_name="adapter", lora_path=str(folder)))
    update = {"adapter_model.safetensors": b"\1" * 4096, "adapter_config.json": b'{"r": 8, "lora_alpha": 32}'}
    (tmp_path / "new" / changed).write_bytes(update[changed])
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = prefill.prefill("p", TOKENS, [1, 2, 3], lora_request=loras[0])
    (keep,) = prefill.orders().keeps
    digests = [
        decode.decode(f"d{number}", TOKENS, offer, lora_request=lora).prompt_digest for number, lora in enumerate(loras)
    ]
    assert [each == keep.prompt_digest for each in digests] == [True, True, False]


def test_an_update_on_disk_counts_when_the_engine_loads_it(vllm: SimpleNamespace, tmp_path: Path) -> None:
    """An engine goes on with the weights that it loaded, whatever is written to their folder."""
    digests = []
    for load, content in ((1, b"\0"), (1, b"\1"), (2, b"\1")):
        (tmp_path / "adapter_model.safetensors").write_bytes(content * 4096)
        lora = SimpleNamespace(lora_name="adapter", lora_path=str(tmp_path), lora_int_id=load)
        prefill = Engine(vllm)
        prefill.prefill("p", TOKENS, [1, 2, 3], lora_request=lora)
        (keep,) = prefill.orders().keeps
        digests.append(keep.prompt_digest)
    assert [each == digests[0] for each in digests] == [True, True, False]


@pytest.mark.parametrize("size", [8, 17, 32])
def test_an_offer_with_another_block_size_than_its_workers_is_no_offer(
    vllm: SimpleNamespace, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A decode engine that has the beginning of the prompt would take the rest from other blocks."""
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = {**prefill.prefill("p", TOKENS, [1, 2, 3]), "remote_block_size": size}
    assert decode.side.matched_tokens(request(vllm, "d", TOKENS, offer), SIZE) == (0, False)
    assert f"remote_block_size is {size}: a worker has block_size 16" in caplog.text


@pytest.mark.parametrize("kind", ["pulled", "pushed"])
def test_an_engine_is_offered_nothing_by_itself(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The load failed, because no engine links to itself, and by default vLLM failed the request."""
    engine, another = Engine(vllm), Engine(vllm)
    params = engine.prefill("p", TOKENS, [1, 2, 3])
    place = {key: engine.worker[key] for key in ("cluster_id", "host", "port")}
    if kind == "pushed":
        params = {"do_remote_prefill": True, "transfer_id": "0123456789abcdef", "prefill": place}
    made = request(vllm, "d", TOKENS, dict(params))
    assert engine.side.matched_tokens(made, 0) == (0, False)
    assert f"offer refused: cluster {place['cluster_id']} is one of this engine's workers" in caplog.text
    engine.side.allocated(made, [4, 5, 6], 0)
    orders = engine.orders()
    assert (orders.loads, orders.releases, orders.expects, orders.declines) == ([], [], [], [])
    assert another.side.matched_tokens(request(vllm, "d", TOKENS, dict(params)), 0) == (40, True)


def test_an_image_behind_what_is_offered_does_not_count(vllm: SimpleNamespace) -> None:
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = prefill.prefill("p", TOKENS, [1, 2, 3], mm_features=[image("a", 3)])
    longer = decode.decode("d", [*TOKENS, *range(8)], offer, mm_features=[image("a", 3), image("b", 41)])
    (keep,) = prefill.orders().keeps
    assert longer.prompt_digest == keep.prompt_digest


def test_a_release_says_whose_prompt_it_was(vllm: SimpleNamespace) -> None:
    """Release a request that has all of its prompt, and one that was never scheduled."""
    prefill, decode = Engine(vllm), Engine(vllm)
    offer = prefill.prefill("p", TOKENS, [1, 2, 3])
    (keep,) = prefill.orders().keeps
    for tokens in (TOKENS, [7, *TOKENS[1:]]):
        cached, aborted = (request(vllm, name, tokens, dict(offer or {})) for name in ("cached", "aborted"))
        decode.side.allocated(cached, [1, 2, 3], 0)
        decode.side.finished(aborted, [])
        releases = decode.orders().releases
        assert [each.prompt_digest == keep.prompt_digest for each in releases] == [tokens == TOKENS] * 2


def test_requests_whose_blocks_no_peer_fetches_take_no_more_than_their_share(vllm: SimpleNamespace) -> None:
    """Limit blocks that no peer fetches: they took the whole KV cache."""
    engine = Engine(vllm, 12)
    for number in range(2):
        assert engine.prefill(f"r{number}", TOKENS, [3 * number + i for i in range(3)]) is not None
    assert engine.prefill("further", TOKENS, [6, 7, 8]) is None
    assert engine.prefill("shared", TOKENS, [0, 1, 2]) is not None, "its blocks are kept already"
    assert engine.side.take_counters() == {"lease_no_room": 1}
    assert engine.side.take_counters() == {}
    assert [keep.request_id for keep in engine.orders().keeps] == ["r0", "r1", "shared"]
    engine.side.sent(["r1", "unknown"])
    assert engine.prefill("next", TOKENS, [6, 7, 8]) is not None


def test_blocks_of_answers_count_as_kept(vllm: SimpleNamespace) -> None:
    """Limit all that vLLM keeps: blocks of long answers, and of groups that are not moved, evaded ``max_leased``."""
    engine = Engine(vllm, 12)
    assert engine.prefill("r0", TOKENS, [1, 2, 3, 4, 5], num_computed_tokens=80) is not None
    (keep,) = engine.orders().keeps
    assert keep.blocks == (1, 2, 3), "only those of the prompt are offered"
    assert engine.prefill("r1", TOKENS, [6, 7, 8], num_computed_tokens=40) is None
    assert engine.side.take_counters() == {"lease_no_room": 1}
    engine.side.sent(["r0"])
    made = request(vllm, "r2", TOKENS, {"do_remote_decode": True})
    assert engine.side.finished(made, [1, 2, 3], not_moved=[0, 4, 5, 6, 7]) == (False, None)
    is_kept, _ = engine.side.finished(request(vllm, "r3", TOKENS, {"do_remote_decode": True}), [1, 2, 3], (), [0, 4, 5])
    assert is_kept, "0 is no block"


@pytest.mark.parametrize("named", [{"cache_salt": "tenant"}, {"params": {"client": "tenant"}}], ids=["salt", "router"])
def test_one_client_leaves_room_for_others(vllm: SimpleNamespace, named: dict[str, Any]) -> None:
    engine = Engine(vllm, 12, max_leased=1.0, max_leased_per_client=0.25)
    assert engine.prefill("first", TOKENS, [0, 1, 2], **named) is not None
    assert engine.prefill("second", TOKENS, [3, 4, 5], **named) is None
    assert engine.prefill("another", TOKENS, [3, 4, 5], cache_salt="another") is not None
    assert engine.prefill("unknown", TOKENS, [6, 7, 8], params={"client": 7}) is not None
    assert engine.side.take_counters() == {"lease_no_room": 1}


def test_pushed_requests_for_which_no_peer_asks_take_no_more_than_their_share_either(vllm: SimpleNamespace) -> None:
    engine = Engine(vllm, 12)
    outcomes = []
    for number in range(3):
        params = {"do_remote_decode": True, "transfer_id": f"transfer-{number}"}
        made = request(vllm, f"r{number}", TOKENS, params)
        blocks = [3 * number + i for i in range(3)]
        engine.side.allocated(made, blocks, 0)
        outcomes.append(engine.side.finished(made, blocks))
    assert outcomes == [(True, None), (True, None), (False, None)]
    orders = engine.orders()
    assert [each.name for each in orders.pushed] == ["transfer-0", "transfer-1"]
    assert [each.name for each in orders.abandons] == ["transfer-2"]
    assert engine.side.take_counters() == {"lease_no_room": 1}
    engine.side.sent(["r0"])
    assert len(engine.side._room) == 3


@pytest.mark.parametrize("kind", ["pulled", "pushed"])
def test_requests_that_no_peer_answers_take_no_more_than_their_share(vllm: SimpleNamespace, kind: str) -> None:
    """Limit blocks that wait for peers: eight requests of transfers that no engine computes held a whole KV cache."""
    engine, another = Engine(vllm, 12), Engine(vllm)
    place = {key: another.worker[key] for key in ("cluster_id", "host", "port")}

    def come(number: int, computed: int = 0) -> tuple[Any, tuple[int, bool]]:
        params = {"do_remote_prefill": True, "transfer_id": f"transfer-{number}", "prefill": place}
        if kind == "pulled":
            params = dict(another.prefill(f"p{number}", TOKENS, [1, 2, 3]))
        made = request(vllm, f"d{number}", TOKENS, params)
        found = engine.side.matched_tokens(made, computed)
        engine.side.allocated(made, [3 * number + i for i in range(3)], found[0])
        return made, found

    first, found = come(0)
    assert [found, come(1)[1]] == [(40, True)] * 2
    assert come(2)[1] == come(3, 2 * SIZE)[1] == (0, False), (
        "blocks of its prefix that it has may be needed by it alone"
    )
    orders = engine.orders()
    assert len(orders.loads + orders.expects) == len(orders.releases + orders.declines) == 2
    assert engine.side.take_counters() == {"offer_no_room": 2}
    first.status = vllm.scheduler_side.RequestStatus.FINISHED_ABORTED
    engine.side.finished(first, [])
    assert engine.orders().cancels == ["d0"]
    assert come(4)[1] == (0, False), "until no more bytes of the first one can land"
    engine.side.received(["d0", "unknown"])
    assert come(5)[1] == (40, True)
    engine.side.received(["d1", "d5"])
    assert len(engine.side._awaited) == 0
