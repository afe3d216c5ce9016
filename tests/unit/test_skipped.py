"""The summary of what a run left out is one line."""

from __future__ import annotations

from tests.skipped import line


def test_reasons_are_counted_by_what_was_absent() -> None:
    reasons = ["Skipped: redis-server is not installed: apt-get install redis-server"] * 2
    reasons += ["Skipped: could not import 'torch': No module named 'torch'", "Skipped: torch is not installed"] * 2
    assert line(reasons) == "skipped: 4 need torch, 2 need redis-server"


def test_an_unknown_reason_is_told_as_it_is() -> None:
    assert line(["Skipped: it does not arrange anything"]) == "skipped: 1 (it does not arrange anything)"


def test_the_vendors_headers_are_not_torch() -> None:
    reason = "Skipped: the vendor's headers (torch-npu==2.13.0) are not in .cache/abi (`make abi` runs this check)"
    assert line([reason]) == "skipped: 1 need the vendor's headers"


def test_what_only_hardware_can_run_is_one_count() -> None:
    assert line(["Skipped: needs two NPUs: make hardware"] * 40) == "skipped: 40 need two NPUs"


def test_the_night_and_the_other_loop_come_last() -> None:
    reasons = ["Skipped: Mooncake cannot be loaded (libibverbs.so.1: no such file)"]
    assert line(reasons, nightly=25, other_loop=1200) == (
        "skipped: 1 need Mooncake, 25 nightly, 1200 on the other event loop"
    )


def test_a_run_without_gaps_says_nothing() -> None:
    assert line([]) == ""
