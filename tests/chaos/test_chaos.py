"""Chaos runs of all profiles that are installed here, at night, with a new seed each time.

Each change has seven of them, in ``make chaos``.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import pytest

from tests.profiles import at_night

SECONDS = 60


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiodatadist", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10 * SECONDS)


@pytest.mark.alone
@pytest.mark.timeout(12 * SECONDS)
@pytest.mark.parametrize(
    "profiles",
    [
        at_night("request,blocking"),
        at_night("one-sided,context"),
        at_night("uvloop,request-uvloop"),
        at_night("hccs,roce,request-roce"),
        at_night("redis,mooncake"),
        at_night("checksum,relink"),
        at_night("v1,ranks"),
    ],
)
def test_no_rule_is_broken(profiles: str) -> None:
    done = run(
        "chaos", "--seconds", str(SECONDS), "--profile", profiles, "--seed", str(secrets.randbits(32)), "--json", "-"
    )
    report = json.loads(done.stdout or "{}")
    assert done.returncode == 0, f"{report.get('replay')}: {report.get('profiles')}\n{done.stderr}"
    for profile in report["profiles"]:
        assert profile["checked_bytes"] > 20 << 20, profile
        assert sum(profile["faults"].values()) >= 2, profile
        assert profile["looks"] >= 2, profile
