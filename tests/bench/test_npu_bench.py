"""``aiodatadist bench`` on softnpu under the vendor's names: memory that the host cannot address, as on NPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodatadist._cli.bench.report import BenchReport
from tests import vendor_names
from tests.bench.test_bench import SHORT, bench
from tests.strict.marks import STRICT


@pytest.fixture
def names() -> Iterator[Path]:
    with vendor_names.shared_folder() as folder:
        vendor_names.install(folder)
        vendor_names.install_tool(folder)
        yield folder


@pytest.mark.parametrize("strict", [STRICT] if STRICT else ["hccs", "roce"])
def test_memory_that_the_host_cannot_address(names: Path, strict: str) -> None:
    """Fill and check blocks through pinned memory, as on an NPU, with no memcpy beside them."""
    done = bench(
        *SHORT, "64KiB", "--op", "pull,push,layered,copy", "--json", "-", env=vendor_names.environment(names, strict)
    )
    assert done.returncode == 0, done.stderr
    report = BenchReport.model_validate_json(done.stdout)
    assert report.ran.runtime == "ascend"
    assert report.ran.copiers is None
    assert [row.wrong for row in report.rows] == [[]] * 4
    assert [row.of_memcpy for row in report.rows] == [None] * 4


@pytest.mark.parametrize("strict", [STRICT] if STRICT else ["hccs"])
def test_memcpy_of_memory_that_the_host_cannot_address_is_refused(names: Path, strict: str) -> None:
    env = vendor_names.environment(names, strict)
    done = bench(*SHORT, "64KiB", "--memory", "pool", "--against", "memcpy", env=env)
    assert done.returncode == 1
    assert "--against memcpy: the host cannot address this memory" in done.stderr
