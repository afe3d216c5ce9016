"""Every item of LLM-DataDist's interfaces has a row in docs/traceability.md, and every row a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "traceability.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `([^`]+)` \| [^|]+ \| \[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\) \|")

GROUPS = {
    "LLMDataDist": 14, "LLMModel": 6, "KvCacheManager": 12, "CacheManager": 12, "KvCache": 2, "Cache": 2, "ModelRunner": 3,
    "TensorDesc": 3, "Tensor": 2, "ModelConfig": 11, "LLMConfig": 10, "LLMReq": 6, "LLMClusterInfo": 4, "Others": 16,
    "Pushing": 1, "The C++ interface": 5, "Recipes": 5, "Scripts as they stand": 16,
}  # fmt: skip
"""How many items each group of the interface has."""


def sections() -> dict[str, list[str]]:
    """Return the table rows of each section by its title."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    rows = [[line for line in body.splitlines() if line.startswith("| `")] for body in parts[1::2]]
    return dict(zip(parts[::2], rows, strict=True))


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_item_has_a_row_and_every_row_a_test() -> None:
    found = sections()
    assert {title: len(rows) for title, rows in found.items()} == GROUPS
    without = [row for rows in found.values() for row in rows if ROW.fullmatch(row) is None]
    assert without == []
    for title, rows in found.items():
        names = [row.split("`")[1] for row in rows]
        assert len(set(names)) == len(names), title


def test_every_linked_test_exists() -> None:
    links = {(path, name) for _, name, path in ROW.findall(PAGE)}
    assert len(links) > len(GROUPS)
    missing = sorted(f"{path}::{name}" for path, name in links if name not in functions_of(ROOT / path))
    assert missing == []
