"""Hooks for mkdocs: pages from the repository's top, the reference, and the targets of their links.

Pages are written for GitHub, with links from file to file. A link to a file that is no page of the site leads into the
repository (``repo_url``). If that is not set, the link becomes text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
FROM_THE_TOP = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "security.zh.md": "SECURITY.zh.md",
}
"""Pages of the site that are files of the repository's top."""
INSTEAD = {"README.md": "index.md", "README.zh.md": "index.zh.md"}
"""Files of the top that are no pages, and the pages where their links lead."""
MODULES = (
    "aiodatadist.errors",
    "aiodatadist",
    "aiodatadist.hixl",
    "aiodatadist.blocking",
    "aiodatadist.blocking.hixl",
    "aiodatadist.legacy",
    "aiodatadist.context_caching",
    "aiodatadist.context_caching.ems",
    "aiodatadist.telemetry",
    "aiodatadist.telemetry.prometheus",
    "aiodatadist.telemetry.otel",
    "aiodatadist.testing",
    "aiodatadist.testing.pools",
)
"""Each has a page of the reference. A name that several export is described in the first of them."""
FIRST = ("LLMDataDist", "CacheManager", "CacheTask", "LLMConfig", "ContextCache", "Ems", "LLMException")
"""The names that a reader of the reference looks for; all others follow in alphabetical order."""
OTHER_LANGUAGE = re.compile(r"^\[(?:中文|English)\]\([^)]*\)\n+", flags=re.MULTILINE)
"""A line for GitHub; the site has a menu."""
OPTION = re.compile(r"<code>(--[\w-]+)</code>")
"""A browser would break its line behind the first two characters."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)$", flags=re.DOTALL | re.MULTILINE)
ENGLISH_ONLY = '!!! note "本页只有英文"\n\n    本页由程序生成或随代码变化。其他页面有中文版。\n\n'


def reference_page(module: str) -> str:
    return f"reference/{module}.md"


@event_priority(50)
def on_files(files: Any, config: Any) -> Any:
    """Add the pages before the plug-in for languages looks at the files."""
    for page in (*FROM_THE_TOP, *map(reference_page, MODULES)):
        files.append(File(page, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    name = page.file.src_uri
    if name in FROM_THE_TOP:
        return (ROOT / FROM_THE_TOP[name]).read_text(encoding="utf-8")
    modules = [module for module in MODULES if reference_page(module) == name]
    return reference(modules[0]) if modules else None


@event_priority(100)
def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    text = OTHER_LANGUAGE.sub("", markdown, count=1)
    text = with_site_links(text, FROM_THE_TOP.get(name, f"docs/{name}"), config.repo_url)
    is_english_among_chinese = config.theme["language"] == "zh" and not name.endswith(".zh.md")
    return ENGLISH_ONLY + text if is_english_among_chinese else text


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Mark options in the text, and keep the theme's script from asking for sitemaps that do not exist.

    The script would ask beside each page for a sitemap, which is at the top only: two requests that fail. It finds the links
    of other languages by a ``rel`` without a space at its end. Browsers and search engines ignore the space.
    """
    output = OPTION.sub(r'<code class="option">\1</code>', output)
    return output.replace('<link rel="alternate" ', '<link rel="alternate " ')


# ---- links ----


def with_site_links(markdown: str, source: str, repository: str | None) -> str:
    """Rewrite the links in the text of ``source``, a path in the repository, to lead from its page of the site."""
    pages = {path: page for page, path in FROM_THE_TOP.items()} | INSTEAD
    here = pages.get(source, source.removeprefix("docs/"))

    def of_site(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if there in pages or (there.startswith("docs/") and (ROOT / there).is_file()):
            page = pages.get(there, there.removeprefix("docs/"))
            text = title_of(ROOT / there) if text.endswith(posixpath.basename(there).replace(".zh.md", ".md")) else text
            return f"{mark}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{hash_}{anchor})"
        if repository and (ROOT / there).exists():
            return f"{mark}[{text}]({repository.rstrip('/')}/blob/HEAD/{there}{hash_}{anchor})"
        return text if (ROOT / there).exists() else match[0]  # what is not there is for mkdocs to complain about

    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(of_site, part) for number, part in enumerate(parts))


def title_of(page: Path) -> str:
    """Return the title of a page, which the site shows where GitHub shows the file's name."""
    title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if title is None:
        raise ValueError(f"{page} has no title")
    return f"《{title[1]}》" if page.name.endswith(".zh.md") else f"“{title[1]}”"


# ---- the reference ----


def reference(module: str) -> str:
    """Write the page of one module: its purpose, names described elsewhere, and all other names with their docstrings."""
    found = public()
    introduction = (
        _package()[module.removeprefix("aiodatadist").removeprefix(".")] if module != "aiodatadist" else _package()
    )
    first = introduction.docstring.value if introduction.docstring else ""
    if module == "aiodatadist":  # the rest is about inner packages
        first = first.partition("\n\n")[0]
    own = [name for name, (home, _) in found[module].items() if home == module]
    elsewhere = [(name, home, other) for name, (home, other) in found[module].items() if home != module]
    text = [f"# {module}", as_markdown(first)]
    inherited = str(module != "aiodatadist.errors").lower()  # of exceptions it would be the same for each
    text += [f"::: {module}.{name}\n    options:\n      inherited_members: {inherited}" for name in own]
    if elsewhere:
        rows = [
            f'| <span id="{module}.{name}"></span>`{name}` | [`{home}.{other}`][{home}.{other}] |'
            for name, home, other in elsewhere
        ]
        text += ["## Names that are described elsewhere", "\n".join(["| name | is |", "| --- | --- |", *rows])]
    return "\n\n".join(text) + "\n"


def public() -> dict[str, dict[str, tuple[str, str]]]:
    """Return each module's public names, and for each name the module and name under which it is described."""
    described: dict[str, tuple[str, str]] = {}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for path in MODULES:
        module = _package()[path.removeprefix("aiodatadist.")] if path != "aiodatadist" else _package()
        exports = module.exports
        names = [str(name) for name in exports] if exports else [
            name for name, member in module.members.items() if not name.startswith("_") and not member.is_alias
        ]  # fmt: skip
        found[path] = {}
        for name in sorted(names, key=_place):
            final = module.members[name].final_target.path if module.members[name].is_alias else f"{path}.{name}"
            found[path][name] = described.setdefault(final, (path, name))
    return found


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name.lower().lstrip("_"))


_LOADED: list[Any] = []


def _package() -> Any:
    if not _LOADED:
        _LOADED.append(griffe.load("aiodatadist", search_paths=[str(ROOT)], resolve_aliases=True))
    return _LOADED[0]


# ---- docstrings ----

ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`(~?)([^`]+)`")
TABLE = re.compile(r"^(={3,}(?: +={3,})+\n(?:.+\n)*={3,}(?: +={3,})+)$", flags=re.MULTILINE)
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
"""Parameters that are described together."""


def as_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown. It has the few marks of reStructuredText that editors understand."""
    first, gap, more = docstring.partition("\n\n")  # the first line stands in lists of members, so it has to be whole
    text = TABLE.sub(_table, " ".join(first.split()) + gap + more)
    text = ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`", text)
    text = re.sub(r"``([^`\n]+)``", r"`\1`", text)
    text = re.sub(r"(?m)^( *)::\n\n", "", text).replace("::\n\n", ":\n\n")
    head, arguments, rest = text.partition("Args:\n")
    return head + arguments + SEVERAL.sub(_one_by_one, rest) if arguments else text


def _table(match: re.Match[str]) -> str:
    """Convert a table whose columns are where the rulers are."""
    lines = match[0].splitlines()
    starts = [found.start() for found in re.finditer(r"=+", lines[0])]
    ends = [*starts[1:], None]
    rows = [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in lines]
    rows = [row for row in rows if not set("".join(row)) <= {"="}]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(starts), *rows[1:]))


def _one_by_one(match: re.Match[str]) -> str:
    indent, names, words = match.groups()
    return "\n".join(f"{indent}{name}: {words}" for name in names.split(", "))
