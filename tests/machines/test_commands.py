"""``aiodatadist demo`` and ``bench`` between two machines, as a user starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.commands import running, trusting
from tests.machines.networks import Machine, address, cable, machines
from tests.profiles import at_night

PLACE = f"{address(1, 1)}:26001"


pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def both() -> Iterator[tuple[Machine, Machine]]:
    with machines("a", "b") as (a, b):
        cable(a, b)
        yield a, b


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    """Write a text of 330 bytes, 21 blocks, and return its name."""
    file = tmp_path / "prompt.txt"
    file.write_text(("All happy families are alike; each unhappy family is unhappy in its own way. " * 20)[:330])
    return str(file)


@pytest.mark.parametrize("more", [[], at_night(["--layered"])], ids=["pulled", "layered"])
def test_a_demo_on_two_machines_ends_at_both_with_equal_tokens(
    more: list[str], both: tuple[Machine, Machine], prompt: str, tmp_path: Path
) -> None:
    here, there = trusting(tmp_path / "one"), trusting(tmp_path / "other")
    first = ["aiodatadist", "demo", "--listen", PLACE, "--tokens", "8", "--prompt", prompt, *more]
    with running(both[0], first, here) as prefill:
        prefill.until(f"waiting at {PLACE}; on the other machine:")
        with running(both[1], ["aiodatadist", "demo", "--peer", PLACE], there) as decode:
            ends = [each.rest() for each in (decode, prefill)]
    for code, out, errors in ends:
        assert code == 0, errors
        assert out.splitlines()[-2:] == ["KV bytes equal: yes", "tokens equal: yes"]
        assert "both proved first, and bytes travel by tcp" in out
    shown = [out[out.index("the text continues") :].split("bytes  ")[1] for _, out, _ in ends]
    assert shown[0] == shown[1], "both ends show the same figures"


def test_a_demo_says_at_the_end_that_is_left_that_the_other_one_died(
    both: tuple[Machine, Machine], prompt: str, tmp_path: Path
) -> None:
    here, there = trusting(tmp_path / "one"), trusting(tmp_path / "other")
    first = ["aiodatadist", "demo", "--listen", PLACE, "--prompt", prompt]
    with running(both[0], first, here) as prefill:
        prefill.until("waiting at")
        with running(both[1], ["aiodatadist", "demo", "--peer", PLACE], there) as decode:
            decode.until("linked to prefill")
            decode.process.kill()
        code, _, errors = prefill.rest()
    assert code == 1
    assert "the link to decode has ended" in errors or "cluster 2" in errors
    assert errors.count("\n") == 1


def test_a_demo_with_another_key_says_so(both: tuple[Machine, Machine], prompt: str, tmp_path: Path) -> None:
    here, there = trusting(tmp_path / "one"), trusting(tmp_path / "other", f"first {'a5' * 32}\n")
    with running(both[0], ["aiodatadist", "demo", "--listen", PLACE, "--prompt", prompt], here) as prefill:
        prefill.until("waiting at")
        with running(both[1], ["aiodatadist", "demo", "--peer", PLACE], there) as decode:
            code, _, errors = decode.rest()
    assert code == 1
    assert f"cannot link to prefill at {PLACE}" in errors
    assert "key" in errors


def test_a_demo_listens_on_no_network_without_a_key(both: tuple[Machine, Machine], prompt: str) -> None:
    with running(both[0], ["aiodatadist", "demo", "--listen", PLACE, "--prompt", prompt]) as prefill:
        code, _, errors = prefill.rest()
    assert code == 2
    assert "AIODATADIST_TRUST" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("transport", ["auto", at_night("tcp")])
def test_a_benchmark_between_two_machines_checks_every_byte(
    transport: str, both: tuple[Machine, Machine], tmp_path: Path
) -> None:
    here, there = trusting(tmp_path / "one"), trusting(tmp_path / "other")
    owner = ["aiodatadist", "bench", "--role", "prefill", "--listen", PLACE, "--transport", transport]
    with running(both[0], owner, here) as serving:
        assert serving.line() == f"listening on {PLACE}"
        measure = ["aiodatadist", "bench", "--role", "decode", "--peer", PLACE, "--transport", transport]
        measure += ["--op", "pull,push,layered", "--block", "16KiB", "--batch", "16", "--layers", "2"]
        measure += ["--seconds", "0.1", "--windows", "2", "--warmup", "0", "--json", "-"]
        with running(both[1], measure, there) as measuring:
            code, out, errors = measuring.rest()
    assert code == 0, errors
    report = json.loads(out)
    assert report["ran"]["transport"] == "tcp"
    assert [(row["case"]["op"], row["wrong"]) for row in report["rows"]] == [
        ("pull", []),
        ("push", []),
        ("layered", []),
    ]
