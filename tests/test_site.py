"""The check of the finished site, which must see every fault; ``make site`` builds the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import site
from tests.unit.test_public_names import PUBLIC

HEAD = '<html lang="{lang}"><head><link rel="stylesheet" href="/site.css"></head><body>'
MENU = '<a href="/{path}" hreflang="en">English</a><a href="/zh/{path}" hreflang="zh">中文</a>'


def written(root: Path, path: str, body: str = "", lang: str = "") -> None:
    lang = lang or ("zh" if path.startswith("zh/") else "en")
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    menu = MENU.format(path=path.removeprefix("zh/"))
    (folder / "index.html").write_text(f"{HEAD.format(lang=lang)}{menu}{body}</body></html>", encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a site without a fault."""
    monkeypatch.setattr(site, "SITE", tmp_path)
    (tmp_path / "site.css").touch()
    for start in ("", "zh/"):
        written(tmp_path, start, f'<a href="/{start}reference/aiodatadist/#aiodatadist.empty">x</a>')
        for module, names in PUBLIC.items():
            ids = "".join(f'<h2 id="{module}.{name}"></h2>' for name in names.split())
            ids += "".join(
                f'<p id="{module}.{name}.{member}"></p>'
                for name in names.split()
                for member in site.members(module, name)
            )
            written(tmp_path, f"{start}reference/{module}/", ids)
    return tmp_path


def faults(root: Path) -> list[str]:
    pages = [site.Page(path) for path in sorted(root.rglob("*.html"))]
    return list(site.faults({page.url: page for page in pages}))


def test_a_good_site_has_no_faults(root: Path) -> None:
    assert faults(root) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="/gone/">x</a>', "/gone/ leads nowhere"),
        ('<a href="/#gone">x</a>', "/#gone leads nowhere"),
        ('<a href="gone.svg">x</a>', "gone.svg leads nowhere"),
        ('<script src="https://elsewhere.example/a.js"></script>', "loads https://elsewhere.example/a.js"),
        ("<p>a [link](page.md)</p>", "shows ']('"),
        ("<p>::: aiodatadist.empty</p>", "shows ':::'"),
        ("<p>=======  =======</p>", "shows '===='"),
        ("<p>:</p>", "has a paragraph of one colon"),
    ],
)
def test_a_page_with_a_fault_is_named(root: Path, body: str, fault: str) -> None:
    written(root, "", body)
    assert faults(root) == [f"{site.ADDRESS}: {fault}"]


def test_marks_inside_code_are_no_fault(root: Path) -> None:
    written(root, "", "<pre><code>[a](b) :::</code></pre>")
    assert faults(root) == []


def test_a_page_in_one_language_is_named(root: Path) -> None:
    written(root, "alone/")
    assert any(fault == "in one language only: ['alone/']" for fault in faults(root))
    assert any("/zh/alone/ leads nowhere" in fault for fault in faults(root))


def test_a_page_in_the_other_language_is_named(root: Path) -> None:
    written(root, "zh/", lang="en")
    assert faults(root) == [f"{site.ADDRESS}zh/: is in en, zh was expected"]


def test_a_name_that_is_not_described_is_named(root: Path) -> None:
    written(root, "reference/aiodatadist.testing.pools/")
    (fault,) = faults(root)
    assert "PoolContract" in fault


def test_an_attribute_and_a_member_that_are_not_described_are_named(root: Path) -> None:
    page = root / "reference" / "aiodatadist" / "index.html"
    for member in ("LLMDataDist.role", "DataType.DT_BF16"):
        page.write_text(page.read_text(encoding="utf-8").replace(f'"aiodatadist.{member}"', '""'), encoding="utf-8")
    (fault,) = faults(root)
    assert fault.endswith("['DataType.DT_BF16', 'LLMDataDist.role'] are not described")


def test_the_lane_installs_what_the_extra_says() -> None:
    lane = site.lane()
    assert not lane.has_package
    assert any(requirement.startswith("mkdocs-material==") for requirement in lane.extra)
