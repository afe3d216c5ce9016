"""Parts of a run of the benchmark: sizes, cases, figures, comparisons."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from aiodatadist._cli.bench.command import speeds
from aiodatadist._cli.bench.compare import compared, comparison, elsewhere, verdict
from aiodatadist._cli.bench.figures import MEMCPY, Latencies, Row, Spread, Window
from aiodatadist._cli.bench.initiator import Lengths
from aiodatadist._cli.bench.machine import Machine, Ran
from aiodatadist._cli.bench.messages import ANSWER, QUESTION, Check, Done, Open, Refused
from aiodatadist._cli.bench.options import BenchOptions
from aiodatadist._cli.bench.report import BenchReport, table, table_lines
from aiodatadist._cli.bench.sizes import parse_size, parse_sizes, size_text
from aiodatadist._cli.bench.workload import Case, MemoryKind, Op
from aiodatadist._cli.kit.errors import CommandError
from aiodatadist._cli.kit.numbers import percentile
from aiodatadist._cli.kit.tables import aligned


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("65536", 65536),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64kib", 65536),
        ("64KB", 64000),
        ("2 MiB", 2 << 20),
    ],
)
def test_a_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "KiB", "64X", "6.4K", "64KiBB", "1" * 30])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes() -> None:
    assert parse_sizes("16K,1M,16384") == [16 << 10, 1 << 20]
    assert parse_sizes("4K:16K,1M") == [4096, 8192, 16384, 1 << 20]
    assert parse_sizes("4K:10K") == [4096, 8192]
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_sizes("16K:4K")
    assert [size_text(size) for size in (65536, 1536 << 10, 3 << 30, 1000)] == ["64KiB", "1536KiB", "3GiB", "1000"]


def case(**values: object) -> Case:
    defaults = {"op": Op.PULL, "memory": MemoryKind.POOL, "block": 4096, "blocks": 16, "layers": 2, "batch": 2}
    return Case.model_validate({"concurrency": 2, **defaults, **values})


@pytest.mark.parametrize("op", Op)
def test_blocks_that_travel_are_apart_and_the_same_at_both_ends(op: Op) -> None:
    one = case(op=op, blocks=33, concurrency=4)
    assert Case.model_validate_json(one.model_dump_json()).moves == one.moves
    for side in (0, 1):
        blocks = [block for moves in one.moves for block in moves[side]]
        assert len(blocks) == len(set(blocks)) == 8
        assert all(0 <= block < 33 for block in blocks)
        assert not {block + 1 for block in blocks} & set(blocks)
    if op is Op.COPY:
        assert not {b for m in one.moves for b in m.sources} & {b for m in one.moves for b in m.targets}
    assert one.moves != case(op=op, blocks=33, concurrency=4, seed=1).moves


def test_a_case_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"blocks is 7: 2 transfers of 2 blocks, no two of them neighbours, need 8"
    ):
        case(blocks=7)
    with pytest.raises(CommandError, match=r"--blocks.* is 3: 1 transfers of 2 blocks"):
        BenchOptions(blocks=3, batch=2).cases()


def test_what_moves_by_default() -> None:
    cases = BenchOptions().cases()
    assert {one.nbytes for one in cases} == {128 << 20}
    assert {one.blocks for one in cases if one.block == 2 << 20} == {16}
    assert {one.nbytes for one in BenchOptions(concurrency=4).cases()} == {32 << 20}
    with pytest.raises(CommandError, match="are more than 128MiB"):
        BenchOptions(layers=80).cases()
    with pytest.raises(CommandError, match="layered does not go with --memory host"):
        BenchOptions(ops=(Op.LAYERED,), memories=(MemoryKind.HOST,)).cases()


def test_messages_come_back_as_they_were() -> None:
    for question in (Open(case=case(), model_id=7), Check()):
        assert QUESTION.validate_json(question.payload()) == question
    for answer in (Done(cpu_seconds=1.5, wrong=["block 1"]), Refused(message="no")):
        assert ANSWER.validate_json(answer.payload()) == answer


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 99)] == [1, 51, 100]
    latencies = Latencies.of([value / 1e6 for value in values])
    assert (latencies.p50, latencies.p99, latencies.max) == pytest.approx((51, 100, 100))
    assert latencies.average == pytest.approx(50.5)


def row(speed: float, **values: object) -> Row:
    """Return a row of half-second windows in which ``speed`` GB/s moved, give or take 2 %."""
    one = case(block=1 << 20, **values)
    windows = []
    for share in (0.98, 0.99, 1.0, 1.01, 1.02):
        count = round(speed * share * 0.5e9 / one.nbytes)
        window = Window(0.5, 0.25, [1e-5] * count, [1e-3] * count, [5e-4] * count, [1e-4, 2e-4])
        windows.append(window)
    return Row.of(one, windows, [10e9] * 5, 0.25, [])


def test_a_row_has_numbers_with_units() -> None:
    one = row(8.0)
    assert one.gigabytes_per_second.median == pytest.approx(8.0, rel=0.01)
    assert one.of_memcpy is not None
    assert one.of_memcpy.median == pytest.approx(0.8, rel=0.01)
    assert one.transfers_per_second.median == pytest.approx(8e9 / one.bytes, rel=0.01)
    assert one.cpu_seconds_per_gigabyte == pytest.approx((5 * 0.25 + 0.25) / 20, rel=0.01)
    assert one.loop_late_p99_us == pytest.approx(200)
    assert one.latency_us is not None
    assert one.post_us is not None
    assert one.transfer_us is not None
    assert (one.latency_us.p50, one.post_us.p99, one.transfer_us.max) == pytest.approx((1000, 10, 500))
    assert Row.model_validate_json(one.model_dump_json()) == one


def test_without_memcpy_there_is_no_ratio() -> None:
    one = row(8.0)
    bare = Row.of(one.case, [Window(0.5, 0.25, [1e-5], [1e-3], [5e-4], [])], [], 0.0, None)
    assert (bare.memcpy_gigabytes_per_second, bare.of_memcpy, bare.wrong) == (None, None, None)
    head, line = table([bare])
    assert line[head.index("memcpy")] == line[head.index("Check")] == "-"


def test_what_was_not_measured_is_no_number() -> None:
    """Another library says how long a transfer takes, and no more; of memcpy only all rounds together are timed."""
    one = row(8.0)
    other = Row.of(one.case, [Window(0.5, 0.25, latency=[1e-3] * 4)], [], 0.0, None, ("nixl", ""))
    copies = Row.of(one.case, [Window(0.5, 0.25, untimed=4)], [], 0.0, None, (MEMCPY, ""))
    assert (other.post_us, other.transfer_us, other.loop_late_p99_us) == (None, None, None)
    assert other.latency_us is not None
    assert (copies.latency_us, copies.transfers, other.transfers) == (None, 4, 4)
    assert copies.gigabytes_per_second == other.gigabytes_per_second
    assert '"post_us":null' in other.model_dump_json()
    head, line, last = table([other, copies])
    for column in ("Avg Post (us)", "Avg Tx (us)", "Loop late P99 (us)"):
        assert line[head.index(column)] == last[head.index(column)] == "-"
    assert line[head.index("Avg Lat. (us)")] == "1000.0"
    assert last[head.index("Avg Lat. (us)")] == last[head.index("Max (us)")] == "-"


def test_wrong_bytes_are_seen_in_the_table() -> None:
    head, line = table([row(8.0).model_copy(update={"wrong": ["block 3"]})])
    assert line[head.index("Check")] == "WRONG"
    assert "B/W (GB/Sec)" in head
    assert len({len(text) for text in aligned([head, line])}) == 1


def test_a_wide_terminal_has_the_percentiles_of_parts_of_a_transfer() -> None:
    rows = [row(8.0), row(8.0, op=Op.PUSH)]
    whole = table(rows, 1000)
    line = dict(zip(*whole[:2], strict=True))
    assert (line["P99 Post (us)"], line["P99 Tx (us)"]) == ("10.0", "500.0")
    columns = len(aligned(whole)[0])
    assert table(rows, columns) == whole
    bare = table(rows, columns - 1)
    assert bare == table(rows)
    assert set(whole[0]) - set(bare[0]) == {"P99 Post (us)", "P99 Tx (us)"}
    assert table([]) == table([], 1000) == []


def test_at_80_columns_there_is_one_table_with_what_matters_most() -> None:
    rows = [row(8.0), row(80.0)]
    whole = table_lines(rows, 1000)
    assert whole == aligned(table(rows, 1000))
    above, *drawn = table_lines(rows, 80)
    assert above == "aiodatadist, pull, pool"
    assert "" not in drawn
    assert max(map(len, drawn)) <= 80
    assert [line.split()[0] for line in drawn[-2:]] == ["1048576", "1048576"]
    head = " ".join(" ".join(drawn[:-2]).split())
    for words in ("B/W (GB/Sec)", "B/W / memcpy", "P99", "Check"):
        assert words in head
    several = table_lines([*rows, row(8.0, op=Op.PUSH)], 80)
    assert several[0] == "aiodatadist, pool"
    assert "" not in several
    assert table_lines([], 80) == []


def test_each_program_that_was_measured_has_its_speed() -> None:
    assert speeds([row(8.0), row(4.0).model_copy(update={"by": "nixl"})]).startswith("8.0")
    assert speeds([row(8.0), row(4.0).model_copy(update={"by": "nixl"})]).endswith("GB/s, nixl 3.99 GB/s")


async def test_a_report_of_another_place_is_told() -> None:
    ran = Ran(
        runtime="soft", strictness="free", libraries=[], version="1", chip="X", transport="hccl", device=1, copiers=2
    )
    machine = (await Machine.here()).model_copy(update={"cpu": "EPYC", "cores": 2})
    new = BenchReport(started=datetime.now(UTC), machine=machine, ran=ran, lengths=Lengths(), rows=[row(8.0)])
    newer = machine.model_copy(update={"aiodatadist": "9", "commit": "1", "kernel": "9"})
    assert elsewhere(new.model_copy(update={"machine": newer}), new) is None, "what is compared is the program"
    other = machine.model_copy(update={"cpu": "Xeon", "cores": 64})
    silent = ran.model_copy(update={"runtime": "ascend", "strictness": None, "copiers": None})
    told = elsewhere(new.model_copy(update={"machine": other, "ran": silent}), new)
    differ = "processor Xeon, now EPYC; cores 64, now 2; runtime ascend, now soft"
    assert told == f"The older report is from another machine: {differ}"
    moved = new.model_copy(update={"ran": ran.model_copy(update={"copiers": 4})})
    assert comparison(moved, new, 80)[0] == "The older report is from another machine: copiers 4, now 2"
    assert len(comparison(new, new, 200)) == len(comparison(moved, new, 200)) - 1


def test_a_report_from_before_copiers_and_commits_were_in_it_is_still_one() -> None:
    ran = Ran(runtime="soft", strictness="free", libraries=[], version="1", chip="X", transport="hccl", device=1)
    older = ran.model_dump(exclude={"copiers"})
    assert Ran.model_validate(older) == ran


def test_reports_are_compared_row_by_row() -> None:
    old = [row(8.0), row(8.0, op=Op.PUSH), row(8.0, memory=MemoryKind.USER), row(8.0, layers=4)]
    new = [row(10.0), row(6.0, op=Op.PUSH), row(8.05, memory=MemoryKind.USER), row(8.0, layers=8)]
    verdicts = [line[2] for line in compared(old, new)[1:]]
    assert verdicts == ["faster", "slower", "within the spread", "new", "gone"]
    assert verdict(Spread.of([1.0]), Spread.of([1.0])) == "within the spread"
