"""Programs that mypy --strict has to refuse, line by line: one run over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

import aiodatadist

VALUES = Path(aiodatadist.__file__).parent / "_values"
SEEN = ("addresses", "checks", "cluster_info", "descriptors")
"""The modules whose types the snippet uses. The others are not read, which keeps the run at a few seconds."""

SNIPPET = """\
from aiodatadist._values.cluster_info import LLMClusterInfo
from aiodatadist._values.descriptors import BlocksCacheKey, CacheKey

BlocksCacheKey(1)
BlocksCacheKey(1, 2)
BlocksCacheKey(cluster_id=1, model_id=2)
BlocksCacheKey(prompt_cluster_id=1)
BlocksCacheKey("x", wrong=3)  # refused
BlocksCacheKey("x")  # refused
BlocksCacheKey(1, wrong=3)  # refused
BlocksCacheKey()  # refused
BlocksCacheKey(1, 2, 3)  # refused
CacheKey(1, 2)
CacheKey(1, 2, 3, 4)
CacheKey(prompt_cluster_id=1, req_id=2, prefix_id=3)
CacheKey(1)  # refused
CacheKey(1, "2")  # refused
CacheKey(1, 2, wrong=3)  # refused
CacheKey(cluster_id=1, prompt_cluster_id=1, req_id=2)  # refused
LLMClusterInfo()
LLMClusterInfo(1, 2)
LLMClusterInfo(1, ("10.0.0.7", 26001))
LLMClusterInfo(1, "10.0.0.7:26001")
LLMClusterInfo(1, address="10.0.0.7:26001")
LLMClusterInfo(1, ("10.0.0.7", "26001"))  # refused
LLMClusterInfo("1")  # refused
"""


def test_mypy_refuses_wrong_arguments_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    monkeypatch.chdir(VALUES.parent.parent)
    arguments = ["--strict", "--follow-imports=skip", "--explicit-package-bases", f"--cache-dir={tmp_path / 'cache'}"]
    out, err, _ = api.run([*arguments, str(snippet), *(str(VALUES / f"{name}.py") for name in SEEN)])
    assert err == ""
    found = {int(line.split(":")[1]) for line in out.splitlines() if line.startswith(str(snippet)) and "error:" in line}
    wanted = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# refused")}
    assert found == wanted, out
