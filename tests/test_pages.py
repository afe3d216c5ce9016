"""README and docs/: every link leads somewhere, and no Chinese page is behind its English one, as far as a test can see."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import LLMConfig, Quotas
from aiodatadist._config.llm_config import _OPTIONS
from tests import pages

LINKED = [*sorted(pages.ROOT.glob("*.md")), *sorted((pages.ROOT / "docs").rglob("*.md"))]
TRANSLATED = [page for page in pages.ENGLISH if pages.chinese(page).exists()]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.name


def test_every_page_has_a_chinese_one_or_a_reason() -> None:
    assert {page.name for page in pages.ENGLISH} - {page.name for page in TRANSLATED} == set(pages.NOT_TRANSLATED)
    beside = {page.name for page in LINKED if page.name.endswith(".zh.md")}
    assert beside == {pages.chinese(page).name for page in TRANSLATED}


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_the_two_languages_lead_to_each_other(page: Path) -> None:
    other = pages.chinese(page)
    assert pages.OTHER_LANGUAGE.findall(text_of(page)) == [other.name]
    assert pages.OTHER_LANGUAGE.findall(text_of(other)) == [page.name]


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for path, anchor in pages.links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in pages.anchors(text_of(target)), f"{path}#{anchor}"


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_chinese_pages_lead_to_chinese_pages(page: Path) -> None:
    other = pages.chinese(page)
    english = {path for path, _ in pages.links(other) if path.endswith(".md") and not path.endswith(".zh.md")}
    assert {path for path in english if pages.chinese(other.parent / path).exists()} == {page.name}


def test_every_extra_is_in_the_table_of_the_installation() -> None:
    project = tomllib.loads(text_of(pages.ROOT / "pyproject.toml"))["project"]
    (table,) = (
        section.text
        for section in pages.sections(text_of(pages.ROOT / "docs" / "installation.md"))
        if "optional" in section.heading
    )
    rows = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(set(project["optional-dependencies"]) - {"dev"})


# ---- the Chinese pages are not behind ----


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_chinese_page_has_the_same_headings(page: Path) -> None:
    english, other = (pages.sections(text_of(each)) for each in (page, pages.chinese(page)))
    assert [section.level for section in other] == [section.level for section in english]


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_chinese_page_has_the_same_programs(page: Path) -> None:
    english, other = (pages.blocks(text_of(each)) for each in (page, pages.chinese(page)))
    assert [block.kind for block in other] == [block.kind for block in english]
    for ours, theirs in zip(english, other, strict=True):
        if ours.kind in {"console", "text"}:  # what a shell's comment says may be translated
            assert _commands(theirs.text) == _commands(ours.text)
        else:
            assert theirs == ours


def _commands(text: str) -> list[str]:
    return [line.partition("  #")[0].rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_chinese_sections_have_the_same_in_them(page: Path) -> None:
    """Tables with as many rows and columns, lists with as many entries, the same links, words of code, and numbers."""
    english, other = (pages.sections(text_of(each)) for each in (page, pages.chinese(page)))
    different = [
        f"{ours.heading} / {theirs.heading}, {what}: English only {_without(mine, its)}, Chinese only {_without(its, mine)}"
        for ours, theirs in zip(english, other, strict=True)
        for what in ("tables", "items", "links", "code", "figures")
        if (mine := getattr(ours, what)) != (its := getattr(theirs, what))
    ]
    assert different == []


def _without(these: list[Any], those: list[Any]) -> list[Any]:
    return list((Counter(these) - Counter(those)).elements())


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_a_chinese_paragraph_is_one_line(page: Path) -> None:
    """GitHub and the site show the end of a line as a space, which Chinese has none of."""
    text = pages.without_blocks(text_of(pages.chinese(page)))
    assert BROKEN.findall(text) == []


BROKEN = re.compile(r"^.*[\u3000-\u9fff\uff00-\uffef]\n[ ]*(?![-#|>!<\s]|\d+\. ).+$", flags=re.MULTILINE)

# ---- what a page quotes ----


def test_every_message_of_the_troubleshooting_is_in_the_source() -> None:
    source = "\n".join(text_of(path) for path in sorted((pages.ROOT / "aiodatadist").rglob("*.py")))
    whole = re.sub(r'"\n\s+f?"', "", source)  # a text over several lines
    page = text_of(pages.ROOT / "docs" / "troubleshooting.md")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(quoted) >= 16
    assert [message for message in quoted if message not in whole] == []


def test_the_table_of_options_is_that_of_the_class() -> None:
    page = text_of(pages.ROOT / "docs" / "configuration.md")
    (table,) = (section.text for section in pages.sections(page) if section.heading == "Options of a cluster")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `([^`]*)` \| (?:`([^`]+)`)? \|$", table, flags=re.MULTILINE)
    keys = {option.field: option.key for option in reversed(_OPTIONS)}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in LLMConfig.model_fields.items()}
    assert [name for name, _, _ in rows] == list(defaults)
    assert {name: ast.literal_eval(default) for name, default, _ in rows} == defaults
    assert {name: key for name, _, key in rows if key} == keys


def test_the_table_of_quotas_is_that_of_the_class() -> None:
    page = text_of(pages.ROOT / "docs" / "configuration.md")
    (table,) = (section.text for section in pages.sections(page) if section.heading == "Quotas")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\S+) \| .+ \|$", table, flags=re.MULTILINE)
    assert {name: ast.literal_eval(default) for name, default in rows} == Quotas().model_dump()


def test_every_environment_variable_is_on_the_page() -> None:
    page = text_of(pages.ROOT / "docs" / "configuration.md")
    files = [*(pages.ROOT / "native" / "softnpu").rglob("*.c"), *(pages.ROOT / "aiodatadist").rglob("*.py")]
    texts = [text_of(path) for path in files]
    names = {name for text in texts for name in re.findall(VARIABLE, text)}
    assert len(names) >= 15
    assert sorted(name for name in names - OF_THE_TESTS if f"`{name}`" not in page) == []


VARIABLE = r'"((?:AIODATADIST|SOFTNPU)_[A-Z_]+|HCCL_(?:CONNECT|EXEC)_TIMEOUT|HCCL_(?:RDMA|OP|INTRA|NPU)_[A-Z_]+)"'
OF_THE_TESTS = {"AIODATADIST_PORTS", "AIODATADIST_TEST_TRANSPORT"}
"""Set by the runs of the tests, and for nothing else."""

# ---- the site's menu ----


def test_every_page_is_in_the_menu_and_every_title_has_a_chinese_one() -> None:
    text = text_of(pages.ROOT / "mkdocs.yml")
    (menu,) = re.findall(r"^nav:\n((?: .*\n)+)", text, flags=re.MULTILINE)
    (chinese,) = re.findall(r"^ +nav_translations:\n((?: {12}.*\n)+)", text, flags=re.MULTILINE)
    entries = re.findall(r"^ +- (.+?):(?: (\S+))?$", menu, flags=re.MULTILINE)
    in_docs = {page.name for page in pages.ENGLISH if page.parent.name == "docs"}
    assert in_docs - {path for _, path in entries} == set()
    titles = {title for title, path in entries if not title.startswith("aiodatadist")}
    assert titles == set(re.findall(r"^ {12}(.+?): ", chinese, flags=re.MULTILINE))


# ---- the instruments ----

SAMPLE = """# One

A figure of 1.5 GB/s, `code` and [a page](other.zh.md#there), [another](x.md).

<!-- fragment: sample -->
```python
# first.py: no heading
```

| a | b |
| --- | --- |
| 1 | 2 |

## Two, and `three`

1. first
2. second
"""


def test_a_page_is_taken_apart() -> None:
    before, one, two = pages.sections(SAMPLE)
    assert (before.text, one.level, one.heading, two.level, two.heading) == ("", 1, "One", 2, "Two, and `three`")
    assert one.tables == [(3, 2)]
    assert one.code == ["code"]
    assert one.figures == ["1", "1.5", "2"]
    assert one.links == ["other.md", "x.md"]
    assert two.items == [2]
    assert pages.anchors(SAMPLE) == {"one", "two-and-three"}
    (block,) = pages.blocks(SAMPLE)
    assert (block.kind, block.mark, block.title) == ("python", "fragment: sample", "first.py")


def test_commands_are_compared_without_their_comments() -> None:
    assert _commands("$ make  # all\n$ ls\n") == _commands("$ make  # 全部\n$ ls\n") != _commands("$ make\n$ rm\n")


def test_broken_paragraphs_are_found() -> None:
    assert BROKEN.findall("前\n后\n\n- 一\n  二\n") == ["前\n后", "- 一\n  二"]
    assert BROKEN.findall("# 一\n\n二\n\n- 三\n- 四\n\n1. 五\n2. 六\n| 七 |\n") == []
