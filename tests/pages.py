"""The pages that people read, taken apart: headings, fenced blocks, tables, links, and what is written between all these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGLISH = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if ".zh" not in page.suffixes),
]
"""Pages with programs; most have a Chinese one beside them."""
NOT_TRANSLATED = {
    "architecture.md": "for developers of the package, and changes with it",
    "performance.md": "written by benchmarks.performance",
    "traceability.md": "names of items and of tests, in a table that a test reads",
}

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.+?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", flags=re.DOTALL | re.MULTILINE
)
HEADING = re.compile(r"^(#+) (.+)$", flags=re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
OTHER_LANGUAGE = re.compile(r"^\[(?:中文|English)\]\(([^)]*)\)$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment in front of it, which readers do not see."""

    kind: str
    text: str
    mark: str

    @property
    def title(self) -> str:
        """The name ``hybrid.py`` from a first line ``# hybrid.py: ...``; empty if it is no whole program."""
        found = re.match(r"# (\S+\.py):", self.text)
        return found[1] if found else ""


@dataclass(frozen=True)
class Section:
    """A heading, and what is behind it until the next one."""

    level: int
    heading: str
    text: str

    @property
    def tables(self) -> list[tuple[int, int]]:
        """The number of rows and columns of each table."""
        found = re.findall(r"(?:^\|.*\|$\n?)+", without_blocks(self.text), flags=re.MULTILINE)
        lines = [table.strip().splitlines() for table in found]
        return [(len(rows), len(re.findall(r"(?<!\\)\|", rows[0])) - 1) for rows in lines]

    @property
    def code(self) -> list[str]:
        """The texts between backticks."""
        return sorted({" ".join(found.split()) for found in CODE.findall(without_blocks(self.text))})

    @property
    def figures(self) -> list[str]:
        """Numbers outside code, links and headings."""
        prose = LINK.sub(" ", CODE.sub(" ", without_blocks(self.text)))
        prose = re.sub(r"(?m)^\d+\. ", "", prose)
        return sorted(re.findall(r"(?<![A-Za-z\d.])\d+(?:[.,]\d+)*(?:\.\.\d+)?", prose))

    @property
    def items(self) -> list[int]:
        """The number of entries in the lists."""
        return [len(re.findall(r"^(?:- |\d+\. )", without_blocks(self.text), flags=re.MULTILINE))]

    @property
    def links(self) -> list[str]:
        """Files and addresses that are linked to, without the language in a name, and without anchors."""
        found = LINK.findall(without_blocks(OTHER_LANGUAGE.sub("", self.text)))
        return sorted({target.partition("#")[0].replace(".zh.md", ".md") for target in found})


def blocks(text: str) -> list[Block]:
    return [Block(found["kind"], found["text"], found["mark"] or "") for found in FENCE.finditer(text)]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def sections(text: str) -> list[Section]:
    """Split a page into sections. The first one is the text in front of all headings."""
    covered = FENCE.sub(lambda found: re.sub(r"(?m)^#", " ", found[0]), text)
    heads = list(HEADING.finditer(covered))
    ends = [*(head.start() for head in heads), len(text)]
    parts = [Section(0, "", text[: ends[0]])]
    return parts + [
        Section(len(head[1]), head[2], text[head.end() : end]) for head, end in zip(heads, ends[1:], strict=True)
    ]


def chinese(page: Path) -> Path:
    return page.with_name(f"{page.stem}.zh.md")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and the site make from the headings."""
    found: set[str] = set()
    for section in sections(text)[1:]:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section.heading).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(anchor)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Return path and anchor of each link into the repository."""
    for target in LINK.findall(without_blocks(page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if ":" not in path:
            yield path, anchor
