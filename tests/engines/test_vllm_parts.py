"""Parts of the connector beside vLLM's own classes, without an engine."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist import ParamInvalid, new_lease_name, prompt_digest
from aiodatadist._adapters.peers import PeerRule, Peers
from aiodatadist._adapters.settings import Settings
from aiodatadist.context_caching import EmsInvalidArgument
from tests.adapters.kv_memory import opaque_memory

BLOCKS = 8
PROMPT = prompt_digest([1, 2, 3])
LAYERS = 3
FAST: dict[str, Any] = {"heartbeat_interval": 0.1, "link_seconds": 5}


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """Load modules that are there only where vLLM is."""
    inner, base = "aiodatadist._adapters.vllm", "vllm.distributed.kv_transfer.kv_connector"
    names = {
        "torch": "torch", "prometheus": "prometheus_client", "config": "vllm.config", "base": f"{base}.v1.base",
        "metrics": f"{base}.v1.metrics", "factory": f"{base}.factory", "adapter": "aiodatadist.adapters.vllm",
        "offer": f"{inner}.offer", "model": f"{inner}.model", "orders": f"{inner}.orders", "steps": f"{inner}.steps",
        "worker": f"{inner}.worker_side", "kinds": "vllm.v1.kv_cache_interface", "request": "vllm.v1.request",
        "context": f"{inner}.context_scheduler", "scheduler": f"{inner}.scheduler_side", "prompts": f"{inner}.prompts",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own packages
        found = SimpleNamespace(**{name: import_module(module) for name, module in names.items()})
        found.forget = import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics
        return found


class Worker:
    """A worker's half over a KV cache, whose block ``b`` of layer ``l`` holds ``100 * number + 10 * l + b``."""

    def __init__(self, vllm: SimpleNamespace, number: int, cache: Callable[[Any], Any]) -> None:
        self.side = vllm.worker.WorkerSide(
            Settings(device_id=number, **FAST), vllm.model.Model(0, 1, BLOCKS, 16, 2), {}
        )
        self.layers = {f"layer.{i}": cache(vllm.torch) for i in range(LAYERS)}
        for i, layer in enumerate(self.layers.values()):
            for part in self.parts(layer):
                for block in range(BLOCKS):
                    part[block] = 100 * number + 10 * i + block
        self.side.register(self.layers)
        self.sent: set[str] = set()
        self.received: set[str] = set()

    @staticmethod
    def parts(layer: Any) -> list[Any]:
        if isinstance(layer, tuple):
            return list(layer)
        return [layer] if layer.shape[0] == BLOCKS else list(layer)

    def holds(self, block: int) -> list[set[float]]:
        """By layer."""
        return [
            {float(value) for part in self.parts(layer) for value in part[block].unique()}
            for layer in self.layers.values()
        ]

    def until_over(self, request: str) -> None:
        end = time.monotonic() + 20
        while request not in self.sent | self.received:
            assert time.monotonic() < end
            results = self.side.reports.take_results()
            assert not results.failed
            self.sent |= results.sent
            self.received |= results.received
            time.sleep(0.001)


CACHES: dict[str, Callable[[Any], Any]] = {
    "packed": lambda torch: torch.zeros(BLOCKS, 2, 16, 8),
    "apart in one tensor": lambda torch: torch.zeros(2, BLOCKS, 16, 8),
    "apart in two": lambda torch: (torch.zeros(BLOCKS, 16, 8), torch.zeros(BLOCKS, 16, 8)),
    "of two sizes": lambda torch: (torch.zeros(BLOCKS, 16, 8), torch.zeros(BLOCKS, 16, 2)),
}


@pytest.fixture(params=CACHES)
def pair(vllm: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    """Prefill and decode."""
    with ExitStack() as stack:
        made = [Worker(vllm, number, CACHES[request.param]) for number in (0, 1)]
        for each in made:
            stack.enter_context(closing(each.side))
        yield made[0], made[1]


def layer_values(number: int, block: int) -> list[set[float]]:
    return [{float(100 * number + 10 * i + block)} for i in range(LAYERS)]


def test_keys_and_values_packed_and_apart_are_pulled(vllm: SimpleNamespace, pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    orders, lease = vllm.orders, new_lease_name()
    prefill.side.carry_out(orders.Orders(keeps=[orders.Keep("r", lease, (2, 5), PROMPT)]))
    offer = vllm.offer.Offer(
        remote_request_id="r", remote_block_ids=(2, 5), remote_num_tokens=20, remote_block_size=16, lease=lease,
        lease_seconds=60, workers=(prefill.side.address,),
    )  # fmt: skip
    decode.side.carry_out(orders.Orders(loads=[orders.Load("r", offer, 0, (7, 0), PROMPT)]))
    decode.until_over("r")
    prefill.until_over("r")
    assert (decode.holds(7), decode.holds(0)) == (layer_values(0, 2), layer_values(0, 5))
    assert decode.holds(1) == layer_values(1, 1)


def test_keys_and_values_packed_and_apart_are_pushed(vllm: SimpleNamespace, pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    orders, address = vllm.orders, prefill.side.address
    where = {"cluster_id": address.cluster_id, "host": address.host, "port": address.port}
    offer = vllm.offer.PushOffer(transfer_id="t", prefill=where)
    prompt = prompt_digest([1, 2, 3])
    transfer = orders.Transfer("t", "p", prompt)
    decode.side.carry_out(orders.Orders(expects=[orders.Expect("r", offer, 0, (7, 0), prompt)]))
    prefill.side.begin_step(orders.Orders(pushes=[orders.Push(transfer, 0, (2, 5))]))
    end = time.monotonic() + 20
    for i, name in enumerate(prefill.layers):
        assert decode.holds(0)[i] == {100.0 + 10 * i}, "it is not computed yet"
        prefill.side.layer_computed(name)
        if len(prefill.side.address.cache_ids) > 1:
            continue  # the link knows by the first cache that these layers are best sent together
        while decode.holds(0)[i] != {10.0 * i + 5}:
            assert time.monotonic() < end
            time.sleep(0.001)
    prefill.side.end_step()
    prefill.side.carry_out(orders.Orders(pushed=[transfer]))
    decode.until_over("r")
    prefill.until_over("p")
    assert (decode.holds(7), decode.holds(0)) == (layer_values(0, 2), layer_values(0, 5))
    assert decode.holds(1) == layer_values(1, 1)


def test_a_cache_of_another_shape_is_refused(vllm: SimpleNamespace) -> None:
    with closing(vllm.worker.WorkerSide(Settings(), vllm.model.Model(0, 1, BLOCKS, 16, 2), {})) as side:
        with pytest.raises(ParamInvalid, match=r"KV cache of layer has the shape \(4, 4, 8\)"):
            side.register({"layer": vllm.torch.zeros(4, 4, BLOCKS)})
        with pytest.raises(ParamInvalid, match="the blocks of layer lie within each other"):
            side.register({"layer": vllm.torch.zeros(16, BLOCKS).T})


def test_layers_of_a_step_become_ready_once(vllm: SimpleNamespace) -> None:
    steps = vllm.steps.LayerSteps(("a", "b", "c"))
    assert list(steps.computed("a")) == [], "this step pushes nothing"
    synchronizer = steps.begin()
    assert list(steps.computed("b")) == [(synchronizer, 1)]
    assert list(steps.computed("b")) == list(steps.computed("another")) == []
    assert list(steps.end()) == [(synchronizer, 0), (synchronizer, 2)]
    assert list(steps.end()) == []


def transfer_config(
    vllm: SimpleNamespace, connector: str = "AioDataDistConnector", policy: str = "recompute", **extra: Any
) -> Any:
    return vllm.config.KVTransferConfig(
        kv_connector=connector, kv_connector_module_path="aiodatadist.adapters.vllm", kv_role="kv_both",
        kv_load_failure_policy=policy, kv_connector_extra_config=extra,
    )  # fmt: skip


def test_prometheus_has_the_figures(vllm: SimpleNamespace) -> None:
    config = SimpleNamespace(kv_transfer_config=transfer_config(vllm))
    seen = vllm.metrics.KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    first = vllm.adapter.AioDataDistConnector.build_kv_connector_stats(
        {"counters": {"pull_done": 3, "pulled_bytes": 4096, "what is not told": 1}, "seconds": [0.002, 0.2]}
    )
    second = vllm.adapter.AioDataDistConnector.build_kv_connector_stats(
        {"counters": {"pull_done": 2}, "seconds": [7.0], "incidents": {"link_failed": 40, "no kind": 1}}
    )
    stats = first.aggregate(second)
    assert stats.reduce() == {
        "num_successful_transfers": 5, "bytes_transferred": 4096, "avg_transfer_ms": 2400.667, "max_transfer_ms": 7000.0,
    }  # fmt: skip
    seen.observe(stats.data, 1)

    def figure(name: str, engine: str, **labels: str) -> float | None:
        labels = {"model_name": "m", "engine": engine, "connector": "AioDataDistConnector", **labels}
        value: float | None = vllm.prometheus.REGISTRY.get_sample_value(f"vllm:aiodatadist_{name}", labels)
        return value

    assert figure("num_successful_transfers_total", "1") == 5
    assert figure("num_successful_transfers_total", "0") == 0
    assert figure("bytes_transferred_total", "1") == 4096
    assert figure("xfer_time_seconds_count", "1") == 3
    assert figure("xfer_time_seconds_sum", "1") == pytest.approx(7.202)
    assert figure("num_kv_expired_reqs_total", "1") == 0
    assert figure("incidents_total", "1", kind="link_failed") == 40
    assert figure("incidents_total", "0", kind="pull_failed") == 0
    assert figure("incidents_total", "1", kind="no kind") is None


def test_both_connectors_in_one_process_have_their_figures_apart(vllm: SimpleNamespace) -> None:
    """A MultiConnector makes the metrics of each of its connectors, and finds their classes by name."""
    both = [("AioDataDistConnector", {}), ("AioDataDistContextConnector", {"pool": "memory:"})]
    given = [
        {"kv_connector": name, "kv_connector_module_path": "aiodatadist.adapters.vllm", "kv_role": "kv_both",
         "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        for name, extra in both
    ]  # fmt: skip
    transfer = vllm.config.KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": given},
    )  # fmt: skip
    config = SimpleNamespace(kv_transfer_config=transfer)
    seen = vllm.metrics.KVConnectorProm(config, ["model_name", "engine"], {0: ["multi", "0"]})
    data = {
        "AioDataDistConnector": {"counters": {"pull_done": 2}, "seconds": [], "incidents": {"link_failed": 3}},
        "AioDataDistContextConnector": {"counters": {"load_done": 5}, "seconds": [], "incidents": {"link_failed": 1}},
    }
    stats = vllm.metrics.KVConnectorLogging(transfer)
    stats.observe(data)
    assert stats.transfer_stats_accumulator.reduce() == {
        "AioDataDistConnector": {"num_successful_transfers": 2},
        "AioDataDistContextConnector": {"num_successful_loads": 5},
    }
    seen.observe(data, 0)

    def figure(name: str, connector: str, **labels: str) -> float | None:
        value: float | None = vllm.prometheus.REGISTRY.get_sample_value(
            f"vllm:aiodatadist_{name}", {"model_name": "multi", "engine": "0", "connector": connector, **labels}
        )
        return value

    assert [figure("num_successful_transfers_total", name) for name, _ in both] == [2, 0]
    assert [figure("num_successful_loads_total", name) for name, _ in both] == [0, 5]
    assert [figure("incidents_total", name, kind="link_failed") for name, _ in both] == [3, 1]


def test_metrics_that_vllm_forgot_are_made_again(vllm: SimpleNamespace) -> None:
    """Each engine in a process takes the metrics of those before it out of the registry."""
    config = SimpleNamespace(kv_transfer_config=transfer_config(vllm))
    for number in range(2):
        vllm.forget()
        seen = vllm.metrics.KVConnectorProm(config, ["model_name", "engine"], {0: [f"again {number}", "0"]})
        seen.observe({"counters": {"pull_done": 1}, "seconds": []}, 0)
    name = "vllm:aiodatadist_num_successful_transfers_total"
    labels = {"model_name": "again 1", "engine": "0", "connector": "AioDataDistConnector"}
    assert vllm.prometheus.REGISTRY.get_sample_value(name, labels) == 1


def make(vllm: SimpleNamespace, connector: str, changes: dict[str, Any]) -> Any:
    """Make a scheduler's half, for the usual model and settings but for the changes."""
    kinds = vllm.kinds
    full = kinds.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=vllm.torch.float32)
    window = kinds.SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=vllm.torch.float32, sliding_window=64
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer_config(
            vllm, connector, changes.get("policy", "recompute"), **changes.get("extra", {})
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pipeline", 1),
            tensor_parallel_size=changes.get("ranks", 1),
            rank=0,
            decode_context_parallel_size=changes.get("context", 1),
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=changes.get("algorithm", "sha256"), cache_dtype="auto", block_size=16
        ),
        model_config=SimpleNamespace(model="m", revision=None, dtype="float32"),
    )
    mamba = kinds.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(vllm.torch.float32,))
    spec = window if "window" in changes else mamba if "mamba" in changes else full
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    caches = SimpleNamespace(kv_cache_groups=[group] * changes.get("groups", 1), num_blocks=BLOCKS)
    return getattr(vllm.adapter, connector)(config, vllm.base.KVConnectorRole.SCHEDULER, caches)


BOTH = ["AioDataDistConnector", "AioDataDistContextConnector"]


@pytest.mark.parametrize("connector", BOTH)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba": True}, "the KV cache of layer is a MambaSpec"),
        ({"context": 2}, "decode_context_parallel_size is 2"),
        ({"extra": {"prot": 1}}, "prot"),
        ({"extra": {"device_id": -1}}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused_when_the_engine_starts(
    vllm: SimpleNamespace, connector: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(vllm, connector, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "xxhash"}, "prefix_caching_hash_algo is xxhash"),
        ({"window": True}, "the KV cache is a SlidingWindowSpec"),
        ({"groups": 2}, "the model has 2 groups of KV caches: AioDataDistContextConnector can move 1"),
        ({"pipeline": 2}, "pipeline_parallel_size is 2: must be 1"),
        ({"ranks": 2}, "pool is memory:: it is in one process's memory"),
        ({"extra": {"pool": "nothing://x"}}, "nothing"),
        ({"policy": "fail"}, "kv_load_failure_policy is 'fail': must be 'recompute'"),
    ],
)
def test_blocks_that_cannot_be_shared_are_refused(vllm: SimpleNamespace, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, ParamInvalid, EmsInvalidArgument), match=message):
        make(vllm, "AioDataDistContextConnector", changes)
    made = make(vllm, "AioDataDistContextConnector", {"extra": {"pool": "memory:?bytes=1MiB"}})
    assert not made.requires_kv_delivery
    made.shutdown()
    made.shutdown()


def test_the_factory_takes_it_and_cuts_graphs_where_layers_are_pushed(vllm: SimpleNamespace) -> None:
    found = vllm.factory.KVConnectorFactory.get_connector_class(transfer_config(vllm))
    assert found is vllm.adapter.AioDataDistConnector
    assert vllm.base.supports_hma(found)
    assert [found.requires_piecewise_for_cudagraph(extra) for extra in ({}, {"push": True})] == [False, True]


# ---- the scheduler's half ----


def offer_of(vllm: SimpleNamespace, params: dict[str, Any], ranks: int) -> Any:
    """Read the offer as an engine of so many workers that dials any host."""
    anywhere = Peers([PeerRule(host=host) for host in ("*", "0.0.0.0/0")])
    return vllm.offer.Offers(ranks, anywhere, 64).offer_of("r", params, 1 << 30)


def request(vllm: SimpleNamespace, name: str, **params: Any) -> Any:
    """Return a request that was computed whole."""
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=40, num_computed_tokens=40, kv_transfer_params=params,
        prompt_token_ids=list(range(40)), lora_request=None, cache_salt=None, mm_features=[], prompt_embeds=None,
        status=vllm.request.RequestStatus.FINISHED_LENGTH_CAPPED,
    )  # fmt: skip


def test_requests_of_one_transfer_after_each_other_are_pushed_and_beside_each_other_are_not(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    side = vllm.scheduler.SchedulerSide(Settings(), 16, BLOCKS)
    first, retry, later = (
        request(vllm, name, do_remote_decode=True, transfer_id="t") for name in ("first", "retry", "later")
    )
    for each in (first, retry):
        side.allocated(each, [1, 2, 3], 0)
    assert "request retry: transfer_id is t: request first has it" in caplog.text
    assert side.finished(retry, [1, 2, 3]) == (False, None), "its blocks are free at once"
    assert side.finished(first, [1, 2, 3]) == (True, None)
    side.allocated(later, [1, 2, 3], 0)
    assert side.finished(later, [1, 2, 3]) == (True, None)


def test_more_blocks_than_a_lease_keeps_are_not_offered(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    side = vllm.scheduler.SchedulerSide(Settings(), 16, BLOCKS)
    long = request(vllm, "long", do_remote_decode=True)
    long.num_prompt_tokens = long.num_computed_tokens = 16 * (1 << 16) + 1
    assert side.finished(long, range((1 << 16) + 1)) == (False, None), "its blocks are free at once"
    assert "request long: its 65537 blocks are not kept: a lease keeps at most 65536" in caplog.text
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
    assert side.take_orders(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=none)).keeps == []


def test_embeddings_are_part_of_a_prompt(vllm: SimpleNamespace) -> None:
    torch, digest = vllm.torch, vllm.prompts.digest_of
    rows = torch.arange(320, dtype=torch.bfloat16).view(40, 8)
    other = rows.clone()
    other[20, 3] += 1
    plain = request(vllm, "plain")
    embedded = request(vllm, "embedded")
    embedded.prompt_token_ids, embedded.prompt_embeds = None, rows
    changed = request(vllm, "changed")
    changed.prompt_token_ids, changed.prompt_embeds = None, other
    mixed = request(vllm, "mixed")
    mixed.prompt_embeds, mixed.prompt_is_token_ids = rows, [True] * 20 + [False] * 20
    strided = request(vllm, "strided")
    strided.prompt_token_ids, strided.prompt_embeds = None, torch.stack([rows, rows], 1)[:, 0]
    assert len({digest(each, 40) for each in (plain, embedded, changed, mixed)}) == 4
    assert digest(embedded, 20) == digest(changed, 20) != digest(mixed, 20)
    assert digest(strided, 40) == digest(embedded, 40)


@pytest.mark.parametrize("prefill", [{"port": 65535, "cluster_id": 1}, {"port": 99, "cluster_id": 2**64 - 1}])
def test_workers_that_cannot_be_are_no_offer(
    vllm: SimpleNamespace, prefill: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t", "prefill": {"host": "127.0.0.1", **prefill}}
    assert offer_of(vllm, params, 1) is not None
    assert offer_of(vllm, params, 2) is None
    assert "there cannot be 2 workers from this address upwards" in caplog.text


def test_what_an_offer_has(vllm: SimpleNamespace) -> None:
    worker = {
        "cluster_id": 1, "host": "h", "port": 1, "cache_ids": [1], "layout": {},
        "memory": json.loads(opaque_memory().model_dump_json()),
    }  # fmt: skip
    given = {
        "do_remote_prefill": True, "remote_request_id": "p", "remote_block_ids": [7, 8, 9], "remote_num_tokens": 99,
        "remote_block_size": 16, "lease": new_lease_name(), "lease_seconds": 1.0, "workers": [worker],
    }  # fmt: skip
    offer = offer_of(vllm, given, 1)
    assert offer.tokens == 48, "no more than its blocks have"
    changes: list[dict[str, Any]] = [
        {"remote_block_ids": [-1]},
        {"workers": [{**worker, "cache_ids": [0]}]},
        {"workers": []},
        {"remote_block_size": 32},
    ]
    for change in changes:
        assert offer_of(vllm, {**given, **change}, 1) is None


@pytest.mark.parametrize("lag", [0, 1], ids=["in turns", "ahead of the tokens"])
def test_blocks_of_answers_are_saved(vllm: SimpleNamespace, lag: int) -> None:
    """vLLM schedules a step before it knows the token that the last one gave."""
    service = SimpleNamespace(is_looked_up=lambda _: True, found=lambda _: 0, forget=lambda _: None)
    side, tokens = vllm.context.ContextScheduler(service, 4), [0] * 8
    known = SimpleNamespace(request_id="r", num_prompt_tokens=8, block_hashes=[])
    side.allocated(known, list(range(100, 110)), 0)
    saved: list[int] = []
    for step in range(20):
        known.block_hashes = [bytes([i]) * 32 for i in range(len(tokens) // 4)]
        again = SimpleNamespace(
            req_ids=["r"] * (step > 0), new_block_ids=[None], num_computed_tokens=[7 + step], resumed_req_ids=set()
        )
        if step == 0:
            again.new_block_ids = again.num_computed_tokens = []
        orders = side.take_orders(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)] * (step == 0),
                scheduled_cached_reqs=again, num_scheduled_tokens={"r": 1 if step else 8}, preempted_req_ids=None,
            )
        )  # fmt: skip
        saved += [block for save in orders.saves for block in save.blocks]
        if step >= lag:
            tokens.append(0)
    assert saved == [100, 101, 102, 103, 104, 105]
