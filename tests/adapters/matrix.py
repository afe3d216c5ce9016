"""The matrix of docs/serving-engines.md: ``python -m tests.adapters.matrix --write`` brings it up to date.

Each row is two engines with their workers, whose services run in this process, over softnpu and real links. A prompt is
pulled, and another one pushed, and every element is compared with an oracle that knows layer, head and token. A cell says
that it moved, or why it was refused.
"""

# ruff: noqa: RUF001 - Chinese punctuation
from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from aiodatadist import new_lease_name, prompt_digest
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.kv_cache import KvCache, Placed, kv_cache_of
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.pull_orders import GroupOrder, PullOrder
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.regions import ALL_HEADS, Axis, Composition, Heads, heads_by_rank
from aiodatadist._adapters.sendings import Portion
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.model import Model
from tests.adapters.kv_memory import ITEM, axes_in, ended_of, value_of

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCKS = 16
PROMPT = prompt_digest([1, 2, 3])
MOVED = "moved"
TOKENS = 43
WINDOW = 32
"""First token that layers with a window need."""


@dataclass(frozen=True)
class Layer:
    """A layer's tensor. ``order`` has the axes in memory, outermost first, and ``hides`` what the engine does not say."""

    name: str
    order: tuple[str | int, ...] = ("heads", "tokens", 8)
    group: int = 0
    is_latent: bool = False
    is_optional: bool = False
    hides: bool = False
    shares: str = ""


@dataclass(frozen=True)
class Side:
    """An engine: workers of a tensor-parallel group, pipeline stages, tokens of a block, and how layers lie.

    Attributes:
        layout: ``HND`` or ``NHD``: whether heads or tokens are outside; ``BHND``, ``BNHD``: all layers are in each block.
    """

    tensor: int = 1
    stages: int = 1
    tokens: int = 16
    layout: str = "HND"

    def __str__(self) -> str:
        return f"TP{self.tensor}" + (f" PP{self.stages}" if self.stages > 1 else "")


@dataclass(frozen=True)
class Case:
    """A row of the matrix."""

    family: str
    layers: tuple[Layer, ...]
    heads: int
    prefill: Side
    decode: Side
    here: tuple[Layer, ...] | None = None
    """The decode engine's layers, if it has others."""

    def since(self, group: int) -> int:
        """Return the first token of a group that later ones attend to."""
        return WINDOW if any(each.group == group and each.name.endswith("window") for each in self.layers) else 0

    @property
    def words(self) -> list[str]:
        sizes = dict.fromkeys([self.prefill.tokens, self.decode.tokens])
        layouts = dict.fromkeys([self.prefill.layout, self.decode.layout])
        return [
            self.family, str(self.prefill), str(self.decode), " → ".join(map(str, sizes)), " → ".join(layouts),
        ]  # fmt: skip


class Worker:
    """A worker: its memory, its description, and its service."""

    def __init__(self, layers: Sequence[Layer], of: int, side: Side, rank: int, stage: int, is_prefill: bool) -> None:
        shards = min(of, side.tensor)
        heads = tuple(heads_by_rank(shards, side.tensor, of))
        self.side, self.rank = side, rank
        mine = layers[stage * len(layers) // side.stages : (stage + 1) * len(layers) // side.stages]
        self.layers = [layer for layer in mine if not layer.shares]
        shapes = [(layer, *_composed(layer, heads[rank], side)) for layer in self.layers]
        groups = sorted({layer.group for layer in self.layers})
        sizes = {group: [nbytes for layer, _, nbytes in shapes if layer.group == group] for group in groups}
        self._buffer = np.full(BLOCKS * max(map(sum, sizes.values())) // ITEM, -1, np.int32)  # groups share all of it
        at, placed = dict.fromkeys(groups, 0), []
        for number, (layer, composed, nbytes) in enumerate(shapes):
            is_packed = side.layout.startswith("B")
            whole = sum(sizes[layer.group]) if is_packed else nbytes
            begin = self._buffer.ctypes.data + at[layer.group]
            at[layer.group] += nbytes if is_packed else nbytes * BLOCKS
            stop = self._buffer.ctypes.data + self._buffer.nbytes
            said = (ALL_HEADS,) * side.tensor if layer.is_latent else heads
            start = self._buffer.ctypes.data
            placed.append(Placed(layer.name, begin, whole, BLOCKS, composed, said, layer.group, number, start, stop))
        others = [each for each in mine if each.shares]
        placed += [_shared(each.name, next(one for one in placed if one.name == each.shares)) for each in others]
        self.kv: KvCache = kv_cache_of(placed, rank)
        self.regions = self.kv.memory.by_name()
        settings = Settings(device_id=0 if is_prefill else 4, patience_seconds=5, link_seconds=60)
        self.service = BlockService(settings, stage * side.tensor + rank, side.tensor * side.stages)
        self.address = self.service.open(self.kv, {"model": "m"})

    def elements(self, name: str, blocks: dict[int, int], tokens: range) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield head, token and place, and where the element is. ``blocks`` is by the number of a block in the prompt."""
        region = self.regions[name]
        composed = region.composed
        base = self.kv.tensors[composed.plane].addresses[region.tensor] + region.offset - self._buffer.ctypes.data
        heads = range(composed.heads.first, composed.heads.stop)
        if composed.axis("tokens") is None:
            tokens = range(tokens.start - tokens.start % composed.tokens, tokens.stop, composed.tokens)
        rest = [(axis.stride, range(axis.size)) for axis in composed.parts]
        stride = self.kv.tensors[composed.plane].nbytes
        along = {kind: axis.stride for kind in ("tokens", "heads") if (axis := composed.axis(kind))}
        for token, head, *places in product(tokens, heads, *(sizes for _, sizes in rest)):
            at = base + blocks[token // composed.tokens] * stride
            at += along.get("tokens", 0) * (token % composed.tokens)
            at += along.get("heads", 0) * (head - composed.heads.first)
            at += sum(step * place for (step, _), place in zip(rest, places, strict=True))
            yield (head, token, *places), at // ITEM

    def fill(self, name: str, blocks: dict[int, int], tokens: range, salt: int) -> None:
        for where, at in self.elements(name, blocks, tokens):
            self._buffer[at] = (value_of(name, where) + salt) % (2**31 - 1)

    def wrong(self, name: str, blocks: dict[int, int], tokens: range, salt: int) -> list[Any]:
        """Return the elements that are not the prompt's."""
        return [
            (name, where)
            for where, at in self.elements(name, blocks, tokens)
            if self._buffer[at] != (value_of(name, where) + salt) % (2**31 - 1)
        ]

    def outcome(self, request: str) -> str:
        return ended_of(self.service, request).outcomes[request]


def _shared(name: str, one: Placed) -> Placed:
    """Return a layer that uses another one's memory."""
    return Placed(
        name, one.address, one.stride, one.blocks, one.composed, one.heads, one.group, one.layer, one.start, one.stop
    )


def _composed(layer: Layer, heads: Heads, side: Side) -> tuple[Composition, int]:
    """Return the composition of a layer's blocks, and their bytes."""
    mine = ALL_HEADS if layer.is_latent else heads
    order = [each for each in layer.order if each != "heads" or not layer.is_latent]
    if side.layout.endswith("NHD") and "heads" in order and not layer.hides:
        order = ["tokens", "heads", *(each for each in order if isinstance(each, int))]
    axes = axes_in(tuple(order), side.tokens, mine.number, ITEM)
    nbytes = axes[0].size * axes[0].stride
    if layer.hides:
        axes = tuple(Axis("part", *axis[1:]) if axis.kind == "tokens" else axis for axis in axes)
    axes = tuple(sorted(axes, key=lambda axis: axis.kind != "part"))
    return Composition(
        0, side.tokens, mine, axes, ITEM, "int32", "own" if layer.hides else "", layer.is_optional
    ), nbytes


def engine(stack: ExitStack, case: Case, is_prefill: bool) -> list[Worker]:
    side = case.prefill if is_prefill else case.decode
    layers = case.layers if is_prefill or case.here is None else case.here
    made = []
    for stage, rank in product(range(side.stages), range(side.tensor)):
        made.append(Worker(layers, case.heads, side, rank, stage, is_prefill))
        stack.enter_context(closing(made[-1].service))
    return made


def blocks_of(case: Case, side: Side, groups: Sequence[int], first: int) -> dict[int, dict[int, int]]:
    """Return the blocks of a prompt by group and number. Groups have different ones."""
    found: dict[int, dict[int, int]] = {}
    free = iter(range(first, BLOCKS))
    for group in groups:
        since = case.since(group) // side.tokens
        found[group] = {number: next(free) for number in range(since, -(-TOKENS // side.tokens))}
    return found


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def carried_out(case: Case) -> tuple[str, str]:
    """Pull and push, and return both cells. Raises AssertionError if what moved is wrong."""
    log, logger = _Log(), logging.getLogger("aiodatadist")
    logger.addHandler(log)
    propagates, logger.propagate = logger.propagate, False
    try:
        with ExitStack() as stack:
            prefill = engine(stack, case, True)
            decode = engine(stack, case, False)
            return pulled(case, prefill, decode, log), pushed(case, prefill, decode, log)
    finally:
        logger.removeHandler(log)
        logger.propagate = propagates


def _told(log: _Log, outcomes: Sequence[str]) -> str:
    """Return why it was refused, without places and numbers of this run. Each worker of the decode engine logs a line."""
    assert set(outcomes) - {"pull_done", "push_arrived"}
    found = [line for line in log.lines if "cannot be pulled" in line or "do not come" in line]  # before their outcome
    words = re.sub(r"^request \S+ its blocks (cannot be pulled|do not come): ", "", min(found))
    words = re.sub(r" at 127\.0\.0\.1:\d+", "", re.sub(r"( \[LLM_\w+\])+", "", words))
    return f"refused: {words}"


def pulled(case: Case, prefill: list[Worker], decode: list[Worker], log: _Log) -> str:
    groups = sorted({layer.group for layer in case.layers})
    lease = new_lease_name()
    there, here = (blocks_of(case, each[0].side, groups, first) for each, first in ((prefill, 0), (decode, 4)))
    for worker in prefill:
        for name, region in worker.regions.items():
            group = worker.kv.memory.planes[region.composed.plane].group
            worker.fill(name, there[group], range(case.since(group), TOKENS), 1)
        own = [tuple(there[group].values()) for group in groups]
        worker.service.keep("p", lease, own[0], PROMPT, others=own[1:])
    orders = [GroupOrder(tuple(there[group].values()), tuple(here[group].values())) for group in groups]
    tokens = {group: TOKENS - case.since(group) for group in groups}
    one, *more = (GroupOrder(each.blocks, each.into, tokens=tokens[group]) for group, each in enumerate(orders))
    sources = tuple(worker.address for worker in prefill)
    for worker in decode:
        worker.service.pull(
            PullOrder("d", sources, lease, one.blocks, one.into, PROMPT, tokens=one.tokens, others=tuple(more))
        )
    outcomes = [worker.outcome("d") for worker in decode]
    if set(outcomes) != {"pull_done"}:
        return _told(log, outcomes)
    wanted = {name for worker in prefill for name in worker.regions}
    for worker in decode:
        for name, region in worker.regions.items():
            group = worker.kv.memory.planes[region.composed.plane].group
            if name in wanted:
                assert worker.wrong(name, here[group], range(case.since(group), TOKENS), 1) == [], case
    kept = [worker.outcome("p") for worker in prefill]
    assert set(kept) <= {"lease_taken", "lease_released"}, kept
    return MOVED


def pushed(case: Case, prefill: list[Worker], decode: list[Worker], log: _Log) -> str:
    if why := _model_of(case, case.prefill).why_not_pushed:
        return f"refused: {why}"
    log.lines.clear()
    there, here = (blocks_of(case, each[0].side, [0], first)[0] for each, first in ((prefill, 8), (decode, 0)))
    for worker in prefill:
        for name in worker.regions:
            worker.fill(name, there, range(TOKENS), 2)
        worker.service.push("t" * 16, Portion(0, tuple(there.values())), request="p2", prompt=PROMPT)
        worker.service.pushed("t" * 16, "p2", prompt=PROMPT)
    into = tuple(here.values())
    asking = decode[: len(prefill)]  # the others name a worker that is not there
    places = [PeerAddress(**each.address.model_dump(include={"cluster_id", "host", "port"})) for each in prefill]
    for worker in asking:
        workers, others = None, places[worker.rank + len(decode) :: len(decode)]
        if worker.kv.is_replicated and len(prefill) % len(decode) == 0:  # as the router says
            workers = len(prefill)
        order = ExpectOrder("d2", places[worker.rank], "t" * 16, 0, into, prompt=PROMPT, workers=workers)
        for each in (order, *(order.at_replicas(others) if workers else ())):
            worker.service.expect(each)
    outcomes = [worker.outcome("d2") for worker in asking]
    if set(outcomes) != {"push_arrived"}:
        return _told(log, outcomes)
    for worker in decode:
        for name in worker.regions:
            if any(name in each.regions for each in prefill):
                assert worker.wrong(name, here, range(TOKENS), 2) == [], case
    assert {worker.outcome("p2") for worker in prefill} == {"push_done"}, "no worker's blocks are stranded"
    return MOVED


def _model_of(case: Case, side: Side) -> Model:
    groups = len({layer.group for layer in case.layers})
    return Model(0, side.tensor, BLOCKS, side.tokens, 1, stages=side.stages, groups=tuple(range(groups)))


def many(template: str, numbers: int, **about: Any) -> tuple[Layer, ...]:
    """Return layers that differ in a number."""
    return tuple(Layer(template.format(number), **about) for number in range(numbers))


GQA = many("model.layers.{}.self_attn.attn", 2)
LATENT = many("model.layers.{}.self_attn.attn", 2, order=("tokens", 6), is_latent=True)
INDEXED = (*LATENT, *many("model.layers.{}.self_attn.indexer.k_cache", 2, order=("tokens", 3), is_latent=True))
APART = tuple(Layer(f"model.layers.{n}.attn:{part}", ("tokens", "heads", 8)) for n in range(2) for part in (0, 1))
LATENT_APART = tuple(
    Layer(f"model.layers.{n}.attn:{part}", ("tokens", size), is_latent=True)
    for n in range(2)
    for part, size in ((0, 8), (1, 2))
)
SHARED = (*GQA, Layer("model.layers.2.self_attn.attn", shares="model.layers.1.self_attn.attn"))
HYBRID = (*many("model.layers.{}.attn.full", 2), *many("model.layers.{}.attn.window", 2, group=1))
WINDOW_FIRST = (*many("model.layers.{}.attn.window", 2), *many("model.layers.{}.attn.full", 2, group=1))
DRAFT = Layer("model.layers.61.self_attn.attn", ("heads", "tokens", 4), is_optional=True)
MTP = Layer("model.layers.61.mtp_block.self_attn.attn", ("tokens", 6), is_latent=True, is_optional=True)
OWN = many("model.layers.{}.self_attn.attn", 2, order=("heads", "tokens", 8), hides=True)
SQUARE = many("model.layers.{}.self_attn.attn", 1, order=("heads", "tokens", 128))
TWO = many("model.layers.{}.self_attn.attn", 2, order=(2, "heads", "tokens", 8))

CASES: Final = (
    Case("GQA (Llama, Qwen)", GQA, 4, Side(2), Side(2)),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(2), Side(1)),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(1), Side(2)),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(4, tokens=8), Side(2)),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(1, layout="NHD"), Side(1, layout="NHD")),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(2, layout="NHD"), Side(1, layout="HND")),
    Case("GQA (Llama, Qwen)", GQA, 4, Side(1, layout="BHND"), Side(2, layout="BNHD")),
    Case("GQA, blocks of 128 and heads of 128", SQUARE, 1, Side(1, tokens=128), Side(1, tokens=64)),
    Case("GQA, 2 heads beside the 2 of keys and values", TWO, 2, Side(2), Side(1)),
    Case("GQA, fewer heads than workers", GQA, 2, Side(4), Side(1)),
    Case("GQA, fewer heads than workers", GQA, 2, Side(4), Side(4)),
    Case("GQA, fewer heads than workers", GQA, 2, Side(2), Side(4)),
    Case("GQA, prefill in a pipeline", GQA, 2, Side(1, stages=2), Side(1)),
    Case("GQA, prefill in a pipeline", GQA, 2, Side(2, stages=2), Side(1, tokens=32)),
    Case("GQA, keys and values apart (vLLM-Ascend)", APART, 2, Side(2), Side(1)),
    Case("MLA (DeepSeek, Kimi)", LATENT, 1, Side(4), Side(4)),
    Case("MLA (DeepSeek, Kimi)", LATENT, 1, Side(4), Side(1)),
    Case("MLA (DeepSeek, Kimi)", LATENT, 1, Side(1), Side(4)),
    Case("MLA (DeepSeek, Kimi)", LATENT, 1, Side(4, tokens=8), Side(2)),
    Case("MLA, two tensors (vLLM-Ascend)", LATENT_APART, 1, Side(2), Side(1)),
    Case("MLA and an indexer (DeepSeek V3.2, GLM-5)", INDEXED, 1, Side(4), Side(1)),
    Case("MLA and an indexer (DeepSeek V3.2, GLM-5)", INDEXED, 1, Side(1), Side(1)),
    Case("layers that share a KV cache (Gemma 3n)", SHARED, 2, Side(1), Side(2)),
    Case("full attention and windows (gpt-oss, Gemma 3)", HYBRID, 2, Side(1), Side(1)),
    Case("full attention and windows (gpt-oss, Gemma 3)", HYBRID, 2, Side(2), Side(1)),
    Case("full attention and windows (gpt-oss, Gemma 3)", HYBRID, 2, Side(1, layout="BNHD"), Side(2, layout="HND")),
    Case("windows and full attention (gpt-oss, Gemma 3)", WINDOW_FIRST, 2, Side(1), Side(1)),
    Case("windows and full attention (gpt-oss, Gemma 3)", WINDOW_FIRST, 2, Side(2), Side(1, tokens=32)),
    Case("windows and full attention (gpt-oss, Gemma 3)", WINDOW_FIRST, 2, Side(1, tokens=32), Side(2)),
    Case("a draft model at both ends (EAGLE)", (*GQA, DRAFT), 2, Side(2), Side(1)),
    Case("a draft model at both ends (EAGLE)", (*GQA, DRAFT), 2, Side(1), Side(1)),
    Case("a draft layer at the decode engine only (MTP)", LATENT, 1, Side(2), Side(1), (*LATENT, MTP)),
    Case("a draft layer at the prefill engine only (MTP)", (*LATENT, MTP), 1, Side(1), Side(1), LATENT),
    Case("tokens in an order of the kernels (vLLM on a CPU)", OWN, 2, Side(2), Side(1)),
    Case("tokens in an order of the kernels (vLLM on a CPU)", OWN, 2, Side(1), Side(1, tokens=32)),
)


# ---- what an engine refuses when it starts ----


@dataclass(frozen=True)
class Refusal:
    """A configuration with which vLLM does not start."""

    what: str
    spec: str = "FullAttentionSpec"
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        spec = type(self.spec, (SimpleNamespace,), {})(block_size=16, num_kv_heads=2)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0"])
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, "world_size": 1, **self.parallel}
        config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
        try:
            Model.of(config, SimpleNamespace(kv_cache_groups=[group], num_blocks=8), "AioDataDistConnector")
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{self.what} is not refused")


REFUSALS: Final = (
    Refusal("state of linear attention (Mamba, Qwen3-Next)", "MambaSpec"),
    Refusal("cross attention (Whisper)", "CrossAttentionSpec"),
    Refusal("context parallelism of decoding", parallel={"decode_context_parallel_size": 2}),
    Refusal("context parallelism of prefill", parallel={"prefill_context_parallel_size": 2}),
)

# ---- the pages ----

HEADS_OF_COLUMNS: Final = {
    "docs/serving-engines.md": (
        "| model family | prefill | decode | block sizes | layout | pulled | pushed |",
        "| what | what the engine says |",
    ),
    "docs/serving-engines.zh.md": (
        "| 模型系列 | 预填充 | 解码 | 块大小 | 布局 | 拉取 | 推送 |",
        "| 什么 | 引擎怎么说 |",
    ),
}
CHINESE: Final = {
    "GQA (Llama, Qwen)": "GQA（Llama、Qwen）",
    "GQA, blocks of 128 and heads of 128": "GQA，块大小 128，头大小 128",
    "GQA, 2 heads beside the 2 of keys and values": "GQA，2 个头，旁边还有键和值的 2",
    "GQA, fewer heads than workers": "GQA，头比 worker 少",
    "GQA, prefill in a pipeline": "GQA，流水线预填充",
    "GQA, keys and values apart (vLLM-Ascend)": "GQA，键和值分开（vLLM-Ascend）",
    "MLA (DeepSeek, Kimi)": "MLA（DeepSeek、Kimi）",
    "MLA, two tensors (vLLM-Ascend)": "MLA，两个张量（vLLM-Ascend）",
    "MLA and an indexer (DeepSeek V3.2, GLM-5)": "MLA 和索引器（DeepSeek V3.2、GLM-5）",
    "layers that share a KV cache (Gemma 3n)": "共用 KV 缓存的层（Gemma 3n）",
    "full attention and windows (gpt-oss, Gemma 3)": "全注意力和滑动窗口（gpt-oss、Gemma 3）",
    "windows and full attention (gpt-oss, Gemma 3)": "滑动窗口和全注意力（gpt-oss、Gemma 3）",
    "a draft model at both ends (EAGLE)": "两端都有草稿模型（EAGLE）",
    "a draft layer at the decode engine only (MTP)": "只有解码引擎有草稿层（MTP）",
    "a draft layer at the prefill engine only (MTP)": "只有预填充引擎有草稿层（MTP）",
    "tokens in an order of the kernels (vLLM on a CPU)": "token 按内核自己的次序存放（CPU 上的 vLLM）",
    "state of linear attention (Mamba, Qwen3-Next)": "线性注意力的状态（Mamba、Qwen3-Next）",
    "cross attention (Whisper)": "交叉注意力（Whisper）",
    "context parallelism of decoding": "解码的上下文并行",
    "context parallelism of prefill": "预填充的上下文并行",
    MOVED: "已搬移",
}
TABLES: Final = {
    page: [re.compile(rf"^{re.escape(head)}\n\|[ |-]+\|\n((?:\|[^\n]*\n)*)", re.MULTILINE) for head in heads]
    for page, heads in HEADS_OF_COLUMNS.items()
}


def rows_of(page: str, number: int) -> list[list[str]]:
    """Return the cells of a table of a page, in English."""
    found = TABLES[page][number].search((ROOT / page).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page} has no table {HEADS_OF_COLUMNS[page][number]}")
    english = {chinese: word for word, chinese in CHINESE.items()}
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]
    return [[_from_chinese(cell, english) for cell in row] for row in rows]


def _from_chinese(cell: str, english: dict[str, str]) -> str:
    return english.get(cell, cell.replace("拒绝：", "refused: "))


def _to_chinese(cell: str) -> str:
    return CHINESE.get(cell, cell.replace("refused: ", "拒绝："))


def write(rows: Sequence[Sequence[Sequence[str]]]) -> None:
    """Write both tables into both pages."""
    for page, tables in TABLES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        for number, (table, own) in enumerate(zip(tables, rows, strict=True)):
            found = table.search(text)
            if found is None:
                raise ValueError(f"{page} has no table {HEADS_OF_COLUMNS[page][number]}")
            cells = own if ".zh" not in page else [[_to_chinese(cell) for cell in row] for row in own]
            lines = "".join(f"| {' | '.join(row)} |\n" for row in cells)
            text = text[: found.start(1)] + lines + text[found.end(1) :]
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into both pages")
    arguments = parser.parse_args()
    moved = [[*case.words, *carried_out(case)] for case in CASES]
    refused = [[each.what, each.words] for each in REFUSALS]
    if arguments.write:
        write([moved, refused])
    for row in (*moved, *refused):
        print(" | ".join(row), file=sys.stderr)


if __name__ == "__main__":
    main()
