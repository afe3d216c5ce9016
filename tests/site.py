"""The documentation site in ``build/site``, built without a warning, and looked through. Run as ``python -m tests.site``.

mkdocs itself sees links that lead nowhere where a page says so in Markdown. Here is what only finished pages show: links of
the menus and of the reference, the other language, and that a reader's browser asks no other server for anything.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from tests import lanes
from tests.unit.test_public_names import PUBLIC

SITE = lanes.ROOT / "build" / "site"
LANGUAGES = {"en": "", "zh": "zh/"}
ADDRESS = "http://127.0.0.1:8000/"
"""Where mkdocs shows the site while it is written; `SITE_URL` is where it is published."""


def lane() -> lanes.Lane:
    project = tomllib.loads((lanes.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return lanes.Lane("site", extra=tuple(project["optional-dependencies"]["docs"]), has_package=False)


class Page(HTMLParser):
    """A finished page: the addresses that it loads, its links, and the targets for links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.url = ADDRESS + path.relative_to(SITE).as_posix().removesuffix("index.html")
        self.language = ""
        self.ids: set[str] = set()
        self.described: set[str] = set()  # what has a heading
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.alternates: dict[str, str] = {}
        self.text: list[str] = []
        self._is_code = 0
        html = path.read_text(encoding="utf-8")
        self.has_lone_colon = "<p>:</p>" in html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self._is_code += tag in {"pre", "code", "script", "style"}
        if tag in {"h2", "h3"} and "id" in given:
            self.described.add(given["id"])
        if tag == "html":
            self.language = given["lang"]
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "hreflang" in given:
                self.alternates[given["hreflang"]] = given["href"]
        elif tag in {"script", "img", "iframe"} and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preconnect", "preload"}:
            self.loaded.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._is_code -= tag in {"pre", "code", "script", "style"}

    def handle_data(self, data: str) -> None:
        if not self._is_code:
            self.text.append(data)


def faults(pages: dict[str, Page]) -> Iterator[str]:
    """Yield the faults of the finished site, one line each."""
    for page in pages.values():
        for target in {*page.links, *page.loaded}:
            if not leads_somewhere(page, target, pages):
                yield f"{page.url}: {target} leads nowhere"
        yield from (f"{page.url}: loads {address}" for address in page.loaded if urlsplit(address).netloc)
        if page.has_lone_colon:
            yield f"{page.url}: has a paragraph of one colon"
        prose = " ".join(page.text)
        yield from (
            f"{page.url}: shows {mark!r}" for mark in ("](", "```", ":::", ":class:", "====", "<!--") if mark in prose
        )
    yield from of_languages(pages)
    yield from of_reference(pages)


def leads_somewhere(page: Page, target: str, pages: dict[str, Page]) -> bool:
    there = urlsplit(urljoin(page.url, target))
    if f"{there.scheme}://{there.netloc}/" != ADDRESS:
        return there.scheme in {"http", "https", "mailto"}
    if there.path.endswith("/") or there.path == "":
        found = pages.get(f"{ADDRESS}{there.path.removeprefix('/')}")
        return found is not None and (not there.fragment or unquote(there.fragment) in found.ids)
    return (SITE / unquote(there.path).removeprefix("/")).is_file()


def of_languages(pages: dict[str, Page]) -> Iterator[str]:
    """Check that each page is there in both languages, names its own, and leads to the other one."""
    found = {language: set[str]() for language in LANGUAGES}
    for url, page in pages.items():
        path = url.removeprefix(ADDRESS)
        if path == "404.html":
            continue
        language = "zh" if path.startswith("zh/") else "en"
        own = path.removeprefix("zh/")
        found[language].add(own)
        if page.language != language:
            yield f"{url}: is in {page.language}, {language} was expected"
        wanted = {each: f"{ADDRESS}{start}{own}" for each, start in LANGUAGES.items()}
        leads = {each: urljoin(url, target) for each, target in page.alternates.items()}
        if leads != wanted:
            yield f"{url}: leads to {leads} for other languages, {wanted} was expected"
    if found["en"] != found["zh"]:
        yield f"in one language only: {sorted(found['en'] ^ found['zh'])}"


def of_reference(pages: dict[str, Page]) -> Iterator[str]:
    """Check that each public name is described, or is in the table of those that are described elsewhere."""
    for start in LANGUAGES.values():
        for module, names in PUBLIC.items():
            page = pages.get(f"{ADDRESS}{start}reference/{module}/")
            if page is None:
                yield f"{start}reference/{module}: is absent"
                continue
            missing = [name for name in names.split() if f"{module}.{name}" not in page.ids]
            missing += [
                f"{name}.{member}"
                for name in names.split()
                if f"{module}.{name}" in page.described
                for member in members(module, name)
                if f"{module}.{name}.{member}" not in page.ids
            ]
            if missing:
                yield f"{page.url}: {missing} are not described"


def members(module: str, name: str) -> list[str]:
    """Return the public attributes and members of a class, inherited ones too unless it is an exception.

    Another name of a class has none: they are described under the class's own.
    """
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, type) or found.__name__ != name:
        return []
    bases = [found] if issubclass(found, Exception) else found.__mro__
    names: set[str] = set()
    for base in bases:
        if base.__module__.partition(".")[0] == "aiodatadist":
            section = re.search(
                r"^Attributes:\n((?: .*\n?|\n)+)", inspect.cleandoc(base.__doc__ or ""), flags=re.MULTILINE
            )
            entries = re.findall(r"^ {4}(\w+(?:, \w+)*): ", section[1], flags=re.MULTILINE) if section else []
            names |= {
                *vars(base),
                *inspect.get_annotations(base),
                *(each for one in entries for each in one.split(", ")),
            }
    return sorted(each for each in names if not each.startswith("_") and each != "model_config")


def build() -> None:
    """Build the site. Raises SystemExit if mkdocs complains."""
    made = lane()
    lanes.make(made)
    command = [made.venv / "bin" / "mkdocs", "--quiet", "build", "--strict", "--clean"]
    environment = {**os.environ, "SITE_URL": ADDRESS, "NO_MKDOCS_2_WARNING": "1"}
    environment["PATH"] = f"{made.venv / 'bin'}{os.pathsep}{environment['PATH']}"  # ruff, which formats signatures
    done = subprocess.run(
        [str(part) for part in command], cwd=lanes.ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")


def main() -> None:
    build()
    pages = [Page(path) for path in sorted(SITE.rglob("*.html"))]
    found = list(faults({page.url: page for page in pages}))
    if found:
        sys.exit("\n".join(found))
    print(f"build/site: {len(pages)} pages, {sum(len(page.links) for page in pages)} links, without a warning")


if __name__ == "__main__":
    main()
