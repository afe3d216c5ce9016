"""The threats, the tests that show what holds against them, and figures. ``python -m tests.hostile.rows`` prints the tests.

To add a row: take its name out of ``NOT_YET``, put a :class:`Row` into ``ROWS`` in the order of the names, and write its
attack and what holds into the first two columns of the tables in SECURITY.md and SECURITY.zh.md. Then run
``python -m tests.security_table --write``, which fills in the other two columns. To add a test to a row, name its file.

A figure is made of the constants that the product uses or the tests assert. It must not be typed in.
``tests/hostile/test_rows.py`` fails if a file of this folder belongs to no row, if a row names a file without tests, or if
the tables are not those of this file. ``make hostile`` runs every file that a row names.
"""

# ruff: noqa: RUF001 - Chinese punctuation
from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiodatadist._adapters import dials, rendezvous, rendezvous_lines
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm import offer
from aiodatadist._cluster import half_links, key_ring, link_table, pending_client, relinker
from aiodatadist._config.trust import NETWORK_BYTES, SECRET_BYTES
from aiodatadist._context_caching.pools import seals
from aiodatadist._link.control import peer_share
from aiodatadist._link.control.wire import UNVERIFIED_BODY, WHOLE_SECONDS
from aiodatadist._values import foreign, peer_budget
from aiodatadist._wire import seals as frame_seals
from aiodatadist._wire.messages import Welcome
from tests.hostile import frames, on_the_path, wild_counts
from tests.unit.wire.examples import EACH

HOSTILE: Final = "tests/hostile/test_"
ALL: Final = tuple(f"T{number}" for number in range(1, 25))
"""The names of the threats."""
NOT_YET: Final[frozenset[str]] = frozenset()
"""Threats without a row: what holds against them is not built, or its row is not written."""


@dataclass(frozen=True)
class Figure:
    """A figure in words, in English and Chinese. Both must contain the same numbers."""

    english: str
    chinese: str


@dataclass(frozen=True)
class Row:
    """A threat.

    Attributes:
        name: its name.
        tests: files of tests that need nothing installed.
        figures: what the tests assert, in figures.
        with_engines: files of tests that need serving engines.
    """

    name: str
    tests: tuple[str, ...]
    figures: tuple[Figure, ...]
    with_engines: tuple[str, ...] = ()


def _hostile(*names: str) -> tuple[str, ...]:
    return tuple(f"{HOSTILE}{name}.py" for name in names)


def _constant(file: str, name: str) -> int:
    """Return a constant of a file that can be imported only where an engine is installed."""
    for each in ast.parse((Path(__file__).parents[2] / file).read_text(encoding="utf-8")).body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
            return int(ast.literal_eval(each.value))
    raise LookupError(f"{file} has no {name}")


def _number_in(file: str, pattern: str) -> int:
    """Return a constant of a C file."""
    found = re.search(pattern, (Path(__file__).parents[2] / file).read_text(encoding="utf-8"))
    if found is None:
        raise LookupError(f"{file} has no {pattern}")
    return int(found[1])


_MIB: Final = 1 << 20
_EXCUSED: Final = _number_in("native/heartbeats.c", r"enum \{ EXCUSED = (\d+) \};")
_SHORTEST_NAME: Final = _constant("aiodatadist/_adapters/vllm/scheduler_side.py", "SHORTEST_NAME")
_HASH_BYTES: Final = _constant("aiodatadist/_adapters/vllm/context_scheduler.py", "HASH_BYTES")

ROWS: Final = (
    Row(
        "T1",
        _hostile("claims", "claims_of_engines", "forged_offers"),
        (Figure(f"{0} bytes of other blocks used", f"使用其他块的 {0} 字节"),),
        ("tests/engines/test_vllm_claims.py",),
    ),
    Row(
        "T2",
        _hostile("claims", "claims_of_engines"),
        (Figure(f"{0} bytes of another prompt used", f"使用另一个提示词的 {0} 字节"),),
        ("tests/engines/test_vllm_claims.py",),
    ),
    Row(
        "T3",
        _hostile("offers", "dials", "silent_places"),
        (
            Figure(f"{0} dials outside `peers`", f"`peers` 以外 {0} 次拨号"),
            Figure(
                f"{dials.DIALS} dials at a time, {dials.WAITING} addresses wait",
                f"同时 {dials.DIALS} 次拨号，{dials.WAITING} 个地址等待",
            ),
        ),
    ),
    Row(
        "T4",
        _hostile("transfer_names", "transfer_orders"),
        (
            Figure(
                f"names of {_SHORTEST_NAME} characters with keys",
                f"有密钥时名字有 {_SHORTEST_NAME} 个字符",
            ),
        ),
    ),
    Row(
        "T5",
        (*_hostile("offers", "request_fields", "options"), "tests/unit/test_foreign.py", "tests/adapters/test_cut_blocks.py"),
        (
            Figure(f"an offer of {offer.MAX_OFFER >> 10} KiB", f"offer 为 {offer.MAX_OFFER >> 10} KiB"),
            Figure(
                f"{Settings.model_fields['max_offer_workers'].default} workers",
                f"{Settings.model_fields['max_offer_workers'].default} 个 worker",
            ),
        ),
    ),
    Row(
        "T6",
        (*_hostile("claims_of_engines"), "tests/unit/test_lease_room.py", "tests/adapters/test_holds.py"),
        (
            Figure(
                f"a share of {Settings.model_fields['max_leased'].default} of the KV cache",
                f"KV 缓存的 {Settings.model_fields['max_leased'].default}",
            ),
            Figure(
                f"{Settings.model_fields['hold_seconds'].default:g} s at most for requests that wait elsewhere",
                f"为在别处等待的请求最多 {Settings.model_fields['hold_seconds'].default:g} s",
            ),
            Figure(
                f"{Settings.model_fields['max_takers'].default} takers",
                f"{Settings.model_fields['max_takers'].default} 个取用者",
            ),
        ),
    ),
    Row(
        "T7",
        _hostile("taken_ids", "tls_links"),
        (
            Figure(
                f"the newcomer is refused after {link_table.RIVAL_SECONDS:g} s at most",
                f"新来者最多在 {link_table.RIVAL_SECONDS:g} s 之后被拒绝",
            ),
        ),
    ),
    Row(
        "T8",
        _hostile("sealed_links", "key_handshakes", "tls_ends", "changed_lengths"),
        (
            Figure(
                f"seals of {8 * frame_seals.SEAL_BYTES} bits, a window of {frame_seals.WINDOW} messages",
                f"认证码 {8 * frame_seals.SEAL_BYTES} 位，窗口为 {frame_seals.WINDOW} 条消息",
            ),
            Figure(f"{len(EACH)} kinds of messages, each way", f"{len(EACH)} 种消息，每个方向"),
            Figure(f"{WHOLE_SECONDS:g} s for the rest of a message", f"一条消息的其余部分 {WHOLE_SECONDS:g} s"),
        ),
    ),
    Row(
        "T9",
        _hostile("sealed_links"),
        (
            Figure(
                f"a heartbeat of {on_the_path.BEAT} bytes; other signs of life count for {_EXCUSED} silences",
                f"心跳为 {on_the_path.BEAT} 字节；其他存活信号最多算 {_EXCUSED} 个静默期",
            ),
        ),
    ),
    Row(
        "T10",
        _hostile("key_handshakes"),
        (
            Figure(
                f"{len(Welcome.model_fields)} fields, {0} of them about the cluster",
                f"{len(Welcome.model_fields)} 个字段，其中关于集群的有 {0} 个",
            ),
        ),
    ),
    Row(
        "T11",
        _hostile("strangers"),
        (
            Figure(
                f"{peer_budget.UNPROVED_OF_ONE} connections of an address, {peer_budget.UNPROVED} in all, "
                f"{peer_budget.UNPROVED_PER_SECOND}/s that prove nothing",
                f"一个地址 {peer_budget.UNPROVED_OF_ONE} 条连接，总共 {peer_budget.UNPROVED} 条，"
                f"未经证明的 {peer_budget.UNPROVED_PER_SECOND}/s",
            ),
            Figure(
                f"{UNVERIFIED_BODY >> 10} KiB each, {pending_client.CLIENT_TIMEOUT:g} s to the proof, "
                f"{pending_client.ASKING_TIMEOUT:g} s more to the request for a link",
                f"每条 {UNVERIFIED_BODY >> 10} KiB，{pending_client.CLIENT_TIMEOUT:g} s 内证明，"
                f"再有 {pending_client.ASKING_TIMEOUT:g} s 请求链路",
            ),
        ),
    ),
    Row(
        "T12",
        _hostile("budgets", "frames"),
        (
            Figure(
                f"{peer_budget.FRAMES} messages, {peer_budget.FRAME_BYTES // _MIB} MiB and "
                f"{peer_budget.REVOCATIONS} revocations of a peer in a second",
                f"一个对端一秒 {peer_budget.FRAMES} 条消息、{peer_budget.FRAME_BYTES // _MIB} MiB 和 "
                f"{peer_budget.REVOCATIONS} 次收回",
            ),
            Figure(
                f"{peer_budget.NOTES} notifications, {peer_budget.NOTE_BYTES // _MIB} MiB",
                f"{peer_budget.NOTES} 个通知，{peer_budget.NOTE_BYTES // _MIB} MiB",
            ),
            Figure(
                f"1/{peer_share.OTHERS + 1} of the time is spent on reading it beside others",
                f"与其他对端并存时，读取它的时间占 1/{peer_share.OTHERS + 1}",
            ),
            Figure(
                f"{frames.MILLISECONDS:g} ms and {frames.MIB:g} MiB for any message",
                f"任何一条消息 {frames.MILLISECONDS:g} ms 和 {frames.MIB:g} MiB",
            ),
        ),
    ),
    Row("T13", _hostile("trust"), (Figure(f"{0} links of another user", f"另一个用户 {0} 条链路"),)),
    Row(
        "T14",
        _hostile("trust", "certificates"),
        (
            Figure(
                f"{SECRET_BYTES} bytes in a folder, {NETWORK_BYTES} beyond loopback",
                f"文件夹中 {SECRET_BYTES} 字节，环回以外 {NETWORK_BYTES} 字节",
            ),
        ),
    ),
    Row(
        "T15",
        _hostile("bootstrap_server", "bootstrap_keys"),
        (
            Figure(
                f"a line of {rendezvous_lines.MAX_QUESTION >> 10} KiB, {peer_budget.UNPROVED_OF_ONE} connections of an "
                f"address, {rendezvous.CLIENT_SECONDS:g} s each",
                f"一行 {rendezvous_lines.MAX_QUESTION >> 10} KiB，一个地址 {peer_budget.UNPROVED_OF_ONE} 条连接，"
                f"每条 {rendezvous.CLIENT_SECONDS:g} s",
            ),
        ),
    ),
    Row(
        "T16",
        _hostile("sealed_values", "pool_servers"),
        (
            Figure(
                f"0 bytes of a forged value used; AES-256-GCM, a header of {seals.HEADER} bytes",
                f"使用伪造的值的 0 字节；AES-256-GCM，头部 {seals.HEADER} 字节",
            ),
        ),
    ),
    Row(
        "T17",
        _hostile("rotated_keys", "bootstrap_keys", "tls_links"),
        (
            Figure(
                f"looked at for each new link, and every {key_ring.LOOK_SECONDS:g} s",
                f"每条新链路都查看，并且每 {key_ring.LOOK_SECONDS:g} s 查看一次",
            ),
        ),
    ),
    Row(
        "T18",
        _hostile("wild_requests", "policy", "readers"),
        (
            Figure(
                f"0 bytes of {wild_counts.NIGHTLY} wild requests in each mode",
                f"每种模式下 {wild_counts.NIGHTLY} 个乱写的请求传输 0 字节",
            ),
        ),
    ),
    Row(
        "T19",
        (*_hostile("logs", "log_lines"), "tests/unit/test_foreign_input.py", "tests/unit/test_log_calls.py"),
        (Figure(f"{foreign.SHOWN} characters, 1 line of a kind in 1 s", f"{foreign.SHOWN} 个字符，每种 1 s 最多 1 行"),),
    ),
    Row(
        "T20",
        _hostile("unproved", "tls_links"),
        (
            Figure(
                f"another connection after {relinker.UNPROVED_SECONDS:g} s without a proof",
                f"{relinker.UNPROVED_SECONDS:g} s 没有证明之后换一条连接",
            ),
        ),
    ),
    Row(
        "T21",
        (
            *_hostile("shares", "push_shares", "look_ups", "withdrawn_caches", "channels", "answers"),
            "tests/test_host_names.py",
        ),
        (
            Figure(
                f"{peer_budget.EARLY_CLAIMS} early claims, {peer_budget.WANTS} wants, {peer_budget.HELD_CACHES} caches, "
                f"{peer_budget.LOOK_UPS} look-ups of a peer",
                f"一个对端 {peer_budget.EARLY_CLAIMS} 个提前的认领、{peer_budget.WANTS} 个推送、"
                f"{peer_budget.HELD_CACHES} 个缓存、{peer_budget.LOOK_UPS} 个查询",
            ),
        ),
    ),
    Row(
        "T22",
        _hostile("prefix_names"),
        (
            Figure(
                f"names of {8 * _HASH_BYTES} bits",
                f"名字有 {8 * _HASH_BYTES} 位",
            ),
        ),
    ),
    Row(
        "T23",
        _hostile("half_made"),
        (
            Figure(
                f"{half_links.MAX_HALF_LINKS} links are made at a time, the oldest gives way after "
                f"{half_links.UNDISTURBED_SECONDS:g} s",
                f"同时建立 {half_links.MAX_HALF_LINKS} 条链路，最旧的在 {half_links.UNDISTURBED_SECONDS:g} s 之后让位",
            ),
        ),
    ),
    Row(
        "T24",
        _hostile("data_connections", "ranges_over_tcp", "sealed_records"),
        (
            Figure(
                f"{peer_budget.MAX_STREAMS} connections of a link, each {1} time",
                f"一条链路 {peer_budget.MAX_STREAMS} 条连接，每条 {1} 次",
            ),
        ),
    ),
)  # fmt: skip

WITHOUT_A_ROW: Final = {
    f"{HOSTILE}rows.py": "this table",
}
"""Files of this folder that belong to no row, and why."""


def files() -> list[str]:
    """Return every file that a row names, and the files of this folder without a row."""
    named = dict.fromkeys(file for row in ROWS for file in row.tests)
    return [*named, *(file for file in WITHOUT_A_ROW if file not in named)]


if __name__ == "__main__":
    print(*files(), sep="\n")
