"""Log calls above DEBUG: the limiter, and the places named here, whose lines no peer, client or pool can repeat at will.

Everything else is an ``Incident``: one line of each kind a second. ``cli`` and ``testing`` are left
out, whose programs and helpers run for the person who started them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.rooms import ONE_WORKER, modules, nodes_of, plain, room_of, tree_of
from tests.syntax import children, walk

TOGETHER = ONE_WORKER

ABOVE_DEBUG = {"critical", "error", "exception", "fatal", "info", "log", "warn", "warning"}
LEFT_OUT = {"cli", "testing"}

LIMITER = "counting.incidents:Incidents.add"
OWN_CALL = "once for each call of the caller's own that it concerns"
OPENING = "once, when the object is made or opened"
CLOSING = "once, when the object is closed or its task ends"

ALLOWED = {
    LIMITER: (1, "this is the limiter"),
    "adapters.block_service:_Life._open": (1, OPENING),
    "cache.registry:CacheRegistry._fill": (1, OWN_CALL),
    "cluster.engine:Engine._open_transport": (1, OPENING),
    "cluster.listener:_of_both_families": (1, OPENING),
    "cluster.rank_groups:RankGroups._link_all": (1, OWN_CALL),
    "cluster.rank_groups:RankGroups._unlink": (1, OWN_CALL),
    "cluster.rank_groups:RankGroups.link": (1, OWN_CALL),
    "concurrency.loop_thread:LoopThread._run": (1, CLOSING),
    "concurrency.origin:log_unretrieved": (1, OWN_CALL),
    "concurrency.resident:Resident._outlast": (1, CLOSING),
    "concurrency.resident:Resident.keep": (1, CLOSING),
    "datadist:LLMDataDist._suspect": (1, OWN_CALL),
    "hixl.engine:Hixl._open": (1, OPENING),
    "context_caching.ems:_Client._warn": (1, OWN_CALL),
    "context_caching.memory.kv_layout:Layout.__init__": (2, OPENING),
    "context_caching.pool_guard:PoolGuard._say": (2, "once for each change of the gate, which changes with its probes"),
    "context_caching.pools.deferred:DeferredPool.arrive": (1, "once for each probe of the gate"),
    "context_caching.pools.deferred:open_deferred": (1, OPENING),
    "context_caching.pools.lru_store:LruStore.aclose": (1, CLOSING),
    "context_caching.pools.mooncake.pool:MooncakePool.aclose": (1, CLOSING),
    "context_caching.pools.redis.pool:RedisPool.open": (1, OPENING),
    "context_caching.pools.redis.refusals:Refusals.note": (1, "has a limit of its own: a line a minute of each kind"),
    "context_caching.transfer.loans:LoanSet.__exit__": (
        1,
        "each takes a part of the memory for ever, which is bounded",
    ),
    "counting.callbacks:log_raised": (1, "code of the caller's raised, which the caller mends"),
    "datadist:LLMDataDist.finalize": (1, CLOSING),
    "device.device:Device._release": (2, CLOSING),
    "device.device:Device.let_go": (1, CLOSING),
    "device.memory_limit:check_memory_limit": (1, OPENING),
    "legacy.datadist:LLMDataDist._end_models": (2, CLOSING),
    "legacy.datadist:LLMDataDist._unlink": (1, OWN_CALL),
    "transport.blob_exchange:_Meeting._close": (1, OWN_CALL),
    "transport.hccl:HcclTransport._check_pinned": (1, OWN_CALL),
    "transport.hccl:HcclTransport.aclose": (1, CLOSING),
    "transport.local_device:describe": (1, OPENING),
    "transport.registrations:_check_limit": (1, OWN_CALL),
}
"""By place: how many calls it has, and why others cannot repeat its lines."""


def log_calls(node: ast.AST, place: str = "") -> Iterator[str]:
    """Yield the functions that call a logger, or a method of ``logging``, above DEBUG; once for each call."""
    for child in children(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            is_inner = "." in place or (place and place[0].islower())  # a function in a function is the outer one's
            yield from log_calls(child, place if is_inner else f"{place}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in ABOVE_DEBUG:
            owner = ast.unparse(child.func.value)
            if owner.rpartition(".")[2].lower() in {"logger", "_logger", "log", "logging"} or "getLogger" in owner:
                yield place
        yield from log_calls(child, place)


def in_the_package() -> Iterator[str]:
    for module in modules():
        if room_of(module) not in LEFT_OUT:
            yield from (f"{plain(module)}:{place}" for place in log_calls(tree_of(module)))


def test_only_named_places_log_above_debug() -> None:
    found, allowed = Counter(in_the_package()), {place: number for place, (number, _) in ALLOWED.items()}
    assert {place: number for place, number in found.items() if number > allowed.get(place, 0)} == {}, (
        "what peers, clients or pools can cause is told to Incidents.add(Incident.KIND, logger, ...)"
    )
    assert found == allowed, "a place that no longer logs is no longer named"


def _calls_get_logger(value: ast.expr) -> bool:
    return any("getLogger" in (getattr(each, "attr", ""), getattr(each, "id", "")) for each in walk(value))


def test_loggers_have_the_name_that_is_looked_for() -> None:
    for module in modules():
        for node in nodes_of(module):
            if isinstance(node, ast.Assign) and _calls_get_logger(node.value):
                assert [ast.unparse(target) for target in node.targets] == ["logger"], module


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("class A:\n    def f(self):\n        logger.warning('x')", ["A.f"]),
        ("class A:\n    def f(self):\n        self._logger.log(30, 'x')", ["A.f"]),
        ("class A:\n    async def f(self):\n        def g():\n            logger.info('x')", ["A.f"]),
        ("def f():\n    for _ in x:\n        logger.error('x')\n        logger.exception('x')", ["f", "f"]),
        ("def f():\n    def g():\n        logging.getLogger('x').error('x')", ["f"]),
        ("def f():\n    logging.warning('x')", ["f"]),
        ("def f():\n    logger.debug('x')\n    math.log(3)\n    task.exception()", []),
        ("class A:\n    def f(self):\n        incidents.add(Incident.DEFECT, logger, 'x')", []),
    ],
)
def test_calls_are_found(source: str, places: list[str]) -> None:
    assert list(log_calls(ast.parse(source))) == places
