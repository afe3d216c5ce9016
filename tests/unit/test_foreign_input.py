"""Foreign input: it is read in one place, in models with limits, and is shown by one function.

The tests read the package's source, so that what is added later is held to the same.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from aiodatadist import errors
from tests import rooms
from tests.foreign_models import OWN_ROOMS, foreign_models, texts_of_others, unbounded
from tests.syntax import walk

TOGETHER = rooms.ONE_WORKER


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


PARSERS = {
    "validate_json", "validate_python", "validate_strings", "model_validate", "model_validate_json", "from_json", "loads",
    "parse_raw", "parse_obj",
}  # fmt: skip
PARSED_ELSEWHERE = {
    "aiodatadist._values.foreign": "the one reader",
    "aiodatadist._wire.frames": "what the reader refused, once more without the fields of a newer minor version",
    "aiodatadist._transport.blob_exchange": "a rank table, which this engine's user wrote",
    "aiodatadist._transport.local_device": "likewise",
    "aiodatadist._cluster.rank_groups": "likewise",
    "aiodatadist._adapters.sglang.settings": "this engine's environment",
    "aiodatadist._adapters.weights": "the header of a file of weights, which this engine's user chose",
    "aiodatadist._adapters.vllm.lora": "the configuration beside an adapter's weights, which this engine's user chose",
    "aiodatadist._adapters.vllm.model": "this engine's settings",
    "aiodatadist._adapters.lmcache.l2_adapter": "likewise",
    "aiodatadist._adapters.lmcache.remote_connector": "likewise",
}
SAFE = {"printable", "shown", "reason_of", "first_complaint", "len", "type", "isinstance"}
"""What makes a text fit to be shown, or shows something else of it."""
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}
NAMES = {
    "adapters": frozenset({"request", "request_id", "transfer", "bootstrap_addr", "room"}),
    "context_caching": frozenset({"reply"}),
}
"""By room, names of texts that others choose, wherever they are kept: clients of an engine, servers of a pool."""
OWN_TEXTS = {("aiodatadist._concurrency.resident", "self.reason")}
"""Fields of the same names with words of this package."""
ERRORS = {name for room in (errors, builtins) for name, kind in vars(room).items() if _is_error(kind)}
OWNERS = {
    "what",
    "self._settings",
    "settings",
    "self._config",
    "config",
    "mine",
    "self._endpoint",
    "self._call",
    "call",
    "limit",
}
"""What has fields of the same names which this engine's user chose."""


def modules() -> list[str]:
    return [name for name in rooms.modules() if rooms.room_of(name) not in {*OWN_ROOMS, "__main__"}]


@pytest.mark.parametrize("model", foreign_models(), ids=lambda model: f"{model.__module__}.{model.__name__}")
def test_a_model_of_foreign_input_has_limits(model: type[BaseModel]) -> None:
    assert unbounded(model) == []


def test_a_model_without_limits_is_found() -> None:
    class Endless(BaseModel):
        text: str
        texts: list[str]
        pairs: tuple[int, ...]
        names: dict[str, int]
        share: float
        anything: object

    found = unbounded(Endless)
    for field in ("text", "texts", "pairs", "names", "share", "anything"):
        assert any(line.startswith(f"Endless.{field}: ") for line in found), field


def test_input_from_others_is_read_in_one_place() -> None:
    found = [
        f"{module}:{node.lineno} calls {name}"
        for module in modules()
        if module not in PARSED_ELSEWHERE
        for node in rooms.nodes_of(module)
        if isinstance(node, ast.Call) and (name := _called(node)) in PARSERS
    ]
    assert found == []


def test_texts_of_others_are_shown_by_one_function() -> None:
    assert [line for module in modules() for line in shown_raw(module, rooms.tree_of(module))] == []


@pytest.mark.parametrize(
    "line",
    [
        'raise LinkError(f"no: {message.reason}")',
        'logger.info("%s", message.reason)',
        "raise TransferError(message.reason)",
        'logger.log(level, "%s", answer.why[:9])',
        'logger.debug(f"{want.layout}")',
        '"%s" % message.reason',
        '"{}".format(message.reason)',
        '"no: " + message.reason',
        'call(f"{message.reason!r}")',
        'span.set_attribute("x", offer.transfer_id)',
        "counter.labels(offer.transfer_id)",
    ],
)
def test_a_text_that_is_shown_as_it_came_is_found(line: str) -> None:
    assert list(shown_raw("aiodatadist._link.x", ast.parse(line)))
    name = "offer.transfer_id" if "offer" in line else next(x for x in _texts(line))
    assert not list(
        shown_raw("aiodatadist._link.x", ast.parse(line.replace(name, f"printable({name})").replace(")[:9]", ")")))
    )


def _texts(line: str) -> Iterator[str]:
    yield from (x for x in ("message.reason", "answer.why", "want.layout") if x in line)


# ---- reading source ----


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _shown_in(node: ast.AST) -> list[ast.expr]:
    """Return what becomes text in a node: f-string, log call, ``%``, ``format``, ``+`` with a text, span or label."""
    match node:
        case ast.FormattedValue(value=value):
            return [value]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=name)) if name in LOGGED:
            return node.args
        case ast.Call() if _called(node) in ERRORS:
            return [*node.args, *(word.value for word in node.keywords)]
        case ast.Call(func=ast.Attribute(attr="set_attribute" | "labels" | "set_attributes" | "format")):
            return [*node.args, *(word.value for word in node.keywords)]
        case ast.BinOp(left=left, op=ast.Mod() | ast.Add(), right=right) if _is_text(left) or _is_text(right):
            return [left, right]
    return []


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _raw(node: ast.AST, names: frozenset[str]) -> Iterator[ast.expr]:
    """Yield the fields of messages in an expression that no function makes fit to be shown."""
    if isinstance(node, ast.Call) and _called(node) in SAFE:
        return
    if isinstance(node, ast.Compare) or (
        isinstance(node, ast.IfExp) and not any(_raw(x, names) for x in (node.body, node.orelse))
    ):
        return
    if isinstance(node, ast.Attribute):
        if node.attr in texts_of_others() | names and ast.unparse(node.value) not in OWNERS:
            yield node
        return
    if isinstance(node, ast.Name) and node.id in names:
        yield node
    for child in [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node):
        yield from _raw(child, names)


def shown_raw(module: str, tree: ast.AST) -> Iterator[str]:
    names = NAMES.get(rooms.room_of(module), frozenset())
    for node in walk(tree):
        for shown in _shown_in(node):
            for found in _raw(shown, names):
                text = ast.unparse(found)
                if (module, text) not in OWN_TEXTS:
                    yield f"{module}:{found.lineno} shows {text}"
