"""Prepare a checkout for a package index: ``python -m tests.index_page ADDRESS VERSION``, before anything is built of it.

An index shows the README without the repository around it, and links to the addresses in ``project.urls``. Only who publishes
knows the repository's address, so neither stands in the files: this writes both, into the files of the checkout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import pages

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def absolute(text: str, address: str, version: str) -> str:
    """Return the README with links that lead from anywhere: to pages as shown at that version, and pictures as they are."""

    def lead(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if ":" in target or target.startswith("#"):
            return match[0]
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/{version}/{target})"

    return LINK.sub(lead, text)


def urls(address: str, version: str) -> str:
    """Return the table ``project.urls`` of a repository at this address."""
    places = {
        "Repository": address,
        "Documentation": f"{address}/tree/{version}/docs",
        "Changelog": f"{address}/blob/{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{place}"\n' for name, place in places.items())


def prepare(root: Path, address: str, version: str) -> None:
    """Write the addresses into the README and ``pyproject.toml`` of a checkout."""
    if not re.fullmatch(r"https://[\w.-]+(?:/[\w.-]+){2}", address) or not re.fullmatch(
        r"[\w.-]+(?:/[\w.-]+)*", version
    ):
        sys.exit(f"{address} at {version}: must be https://HOST/OWNER/NAME, and the name of a tag or branch")
    readme, project = root / "README.md", root / "pyproject.toml"
    settings = project.read_text(encoding="utf-8")
    if "[project.urls]" in settings:
        sys.exit("pyproject.toml has project.urls: must not have them yet")
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), address, version), encoding="utf-8")
    project.write_text(f"{settings}\n{urls(address, version)}", encoding="utf-8")


if __name__ == "__main__":
    prepare(pages.ROOT, sys.argv[1].rstrip("/"), sys.argv[2])
