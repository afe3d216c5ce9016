"""The checks of tests/packaging.py refuse what a release must not have, and what is configured fits together."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import tomllib
import uuid
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests import bare_root, index_page, packaging, pages, sbom
from tests.packaging import BUILT, ROOT, Wrong

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = frozenset({"README.md", "aiodatadist/__init__.py", "native/ring.c"})


def sdist_of(folder: Path, *names: str) -> Path:
    file = folder / "aiodatadist-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return file


def test_sdist_is_read_without_its_folder(tmp_path: Path) -> None:
    file = sdist_of(tmp_path, "aiodatadist-1.0/PKG-INFO", "aiodatadist-1.0/native/ring.c")
    assert packaging.in_sdist(file) == {"PKG-INFO", "native/ring.c"}


def test_sdist_that_unpacks_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Wrong, match=r"elsewhere/ring\.c"):
        packaging.in_sdist(sdist_of(tmp_path, "aiodatadist-1.0/PKG-INFO", "elsewhere/ring.c"))


def test_sdist_that_is_the_sources_is_good() -> None:
    packaging.check_sdist(SOURCES | {"PKG-INFO"}, SOURCES)


@pytest.mark.parametrize(
    "name",
    ["tests/__pycache__/conftest.cpython-311.pyc", "native/ring.o", "aiodatadist/_native/libring.so", "build/x", ".coverage",
     ".mypy_cache/x", "tests/.hypothesis/x", "aiodatadist.egg-info/PKG-INFO", ".venv/bin/python"],
)  # fmt: skip
def test_sdist_with_what_tests_or_builds_made_is_refused(name: str) -> None:
    with pytest.raises(Wrong, match=rf"made by tests or builds: .*{re.escape(name)}"):
        packaging.check_sdist(SOURCES | {name}, SOURCES | {name})


def test_sdist_without_a_source_is_refused() -> None:
    with pytest.raises(Wrong, match=r"missing: \['native/ring.c'\]"):
        packaging.check_sdist(SOURCES - {"native/ring.c"}, SOURCES)


def test_sdist_with_a_file_of_its_own_is_refused() -> None:
    with pytest.raises(Wrong, match=r"no source: \['notes.txt'\]"):
        packaging.check_sdist(SOURCES | {"notes.txt"}, SOURCES)


def test_sources_are_what_a_release_is_made_of() -> None:
    found = packaging.sources()
    assert {"pyproject.toml", "native/CMakeLists.txt", "native/declare.py", "aiodatadist/py.typed"} <= found
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "native").rglob("*.[ch]")} <= found
    assert not [name for name in found if packaging.MADE.search(name) or name.startswith((".ci/", ".github/"))]


def test_wheel_has_the_package_and_what_was_built() -> None:
    inside = {"aiodatadist/__init__.py", "aiodatadist/", "aiodatadist-1.0.dist-info/METADATA"} | BUILT
    packaging.check_wheel(inside, SOURCES)
    for less in ("aiodatadist/__init__.py", "aiodatadist/_native/libring.so"):
        with pytest.raises(Wrong, match=less):
            packaging.check_wheel(inside - {less}, SOURCES)
    with pytest.raises(Wrong, match=r"of no package: \['tests/conftest.py'\]"):
        packaging.check_wheel(inside | {"tests/conftest.py"}, SOURCES)


def test_libraries_may_link_glibc_alone() -> None:
    softnpu, ring = (f"aiodatadist/_native/lib{name}.so" for name in ("softnpu", "ring"))
    packaging.check_libraries(
        [(softnpu, ["libdl.so.2", "libc.so.6", "ld-linux-x86-64.so.2"]), (ring, ["libpthread.so.0"])]
    )
    with pytest.raises(Wrong, match=r"libring.so links \['libnuma.so.1'\]"):
        packaging.check_libraries([(softnpu, []), (ring, ["libc.so.6", "libnuma.so.1"])])
    with pytest.raises(Wrong, match="shared libraries"):
        packaging.check_libraries([(ring, [])])


def test_what_a_library_links_is_read_from_it(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "made.whl", "w") as archive:
        archive.write(ROOT / "aiodatadist/_native/libring.so", "aiodatadist/_native/libring.so")
        archive.writestr("aiodatadist/__init__.py", "")
    ((name, needed),) = packaging.libraries(tmp_path / "made.whl")
    assert name == "aiodatadist/_native/libring.so"
    assert "libc.so.6" in needed


@pytest.mark.parametrize(
    "tags",
    ["py3-none-manylinux_2_28_x86_64", "py3-none-manylinux_2_27_aarch64.manylinux_2_28_aarch64",
     "py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64"],
)  # fmt: skip
def test_tag_of_a_release(tags: str) -> None:
    packaging.check_tag(f"aiodatadist-1.0-{tags}.whl")


@pytest.mark.parametrize(
    "tags",
    ["py3-none-linux_x86_64", "cp311-cp311-manylinux_2_28_x86_64", "py3-none-any", "py3-none-musllinux_1_2_x86_64"],
)
def test_tag_that_is_refused(tags: str) -> None:
    with pytest.raises(Wrong, match="no wheel of any Python 3 for manylinux"):
        packaging.check_tag(f"aiodatadist-1.0-{tags}.whl")


def test_wheels_are_tried_with_each_python_that_the_package_says_it_is_for() -> None:
    versions = [
        text.removeprefix("Programming Language :: Python :: ").replace(".", "")
        for text in PYPROJECT["project"]["classifiers"]
        if text.startswith("Programming Language :: Python :: 3.")
    ]
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == [f"cp{version}-manylinux_*" for version in versions]


# ---- the image ----


def test_image_is_slim_and_not_roots_and_shows_the_demo() -> None:
    first, last = bare_root.stages(bare_root.DOCKERFILE.read_text())
    assert last.base == f"{first.base}-slim"
    assert last.copies == [f"--from=build {bare_root.PLACE} {bare_root.PLACE}"]
    assert not [line for line in last.runs if "apt" in line or "pip" in line]
    assert last.user not in {"root", "0"}
    assert last.command == ["aiodatadist", "demo"]
    assert last.environment == {"PATH": f"{bare_root.PLACE}/bin:$PATH"}


def test_instruction_that_the_bare_root_does_not_carry_out_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRYPOINT"):
        bare_root.stages('FROM python:3.11-slim\nENTRYPOINT ["aiodatadist"]\n')


def test_compiler_in_the_root_is_found(tmp_path: Path) -> None:
    root = bare_root.Root(tmp_path)
    assert root.compilers() == []
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/gcc").touch()
    assert root.compilers() == ["gcc"]


def test_image_leaves_out_what_git_does() -> None:
    """Keep files that tests and builds leave on a developer's machine out of the build."""
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert set(ignored) - {"*.egg-info", "*.py[co]", ".coverage"} <= left_out


# ---- the bill of materials ----


def wheel_of(folder: Path, *lines: str) -> Path:
    file = folder / "aiodatadist-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    head = (
        "Metadata-Version: 2.4\nName: aiodatadist\nVersion: 0.1.0\nSummary: KV caches\nLicense-Expression: Apache-2.0\n"
    )
    with ZipFile(file, "w") as archive:
        archive.writestr("aiodatadist-0.1.0.dist-info/METADATA", head + "".join(f"Requires-Dist: {x}\n" for x in lines))
        archive.writestr("aiodatadist/_native/ring.so", b"elf")
        archive.writestr("aiodatadist/__init__.py", b"")
    return file


def test_bill_has_what_is_required_what_extras_add_and_each_library(tmp_path: Path) -> None:
    wheel = wheel_of(
        tmp_path,
        "anyio>=4.11",
        "redis>=5; extra == 'redis'",
        "xxhash>=3; extra == 'redis'",
        "xxhash>=3; extra == 'mooncake'",
        "Aiodatadist[redis]; extra == 'dev'",
        "mooncake_engine>=0.3; (python_version < '3.14') and extra == 'mooncake'",
    )
    bill = json.loads(sbom.written(wheel).read_text())
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert uuid.UUID(bill["serialNumber"].removeprefix("urn:uuid:"))
    own = bill["metadata"]["component"]
    assert (own["purl"], own["licenses"]) == ("pkg:pypi/aiodatadist@0.1.0", [{"expression": "Apache-2.0"}])
    assert own["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    packages = {each["bom-ref"]: each for each in bill["components"]}
    assert {ref: each.get("scope") for ref, each in packages.items()} == {
        "pkg:pypi/anyio": "required",
        "pkg:pypi/mooncake-engine": "optional",
        "pkg:pypi/redis": "optional",
        "pkg:pypi/xxhash": "optional",
        "file:aiodatadist/_native/ring.so": None,
    }
    assert [each["name"] for each in packages["pkg:pypi/xxhash"]["properties"]] == [
        "aiodatadist:extra:redis",
        "aiodatadist:extra:mooncake",
    ]
    assert packages["file:aiodatadist/_native/ring.so"]["hashes"][0]["content"] == hashlib.sha256(b"elf").hexdigest()
    assert bill["dependencies"][0] == {"ref": "pkg:pypi/aiodatadist@0.1.0", "dependsOn": ["pkg:pypi/anyio"]}
    assert {each["ref"] for each in bill["dependencies"]} == {own["bom-ref"], *packages}
    assert sbom.bill_of(wheel) == bill


def test_bill_that_lacks_a_library_or_a_requirement_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, *PYPROJECT["project"]["dependencies"])
    bill = sbom.written(wheel)
    packaging.check_bill(bill, wheel)
    for name in ("aiodatadist/_native/ring.so", "anyio"):
        spoiled = json.loads(bill.read_text())
        spoiled["components"] = [each for each in spoiled["components"] if each["name"] != name]
        other = tmp_path / "spoiled.json"
        other.write_text(json.dumps(spoiled))
        with pytest.raises(Wrong, match=rf"lacks \['{name}'\]"):
            packaging.check_bill(other, wheel)


# ---- the page of an index ----


def checkout(folder: Path) -> Path:
    for name in ("README.md", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_on_an_index_every_link_of_the_readme_leads_to_the_repository(tmp_path: Path) -> None:
    before = list(pages.links(ROOT / "README.md"))
    index_page.prepare(checkout(tmp_path), "https://example.org/we/it", "v9.1.0")
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    targets = pages.LINK.findall(text)
    assert len(before) > 20
    assert all(target.startswith("https://") for target in targets)
    assert (
        "![Each layer travels while the next one is computed](https://example.org/we/it/raw/v9.1.0/docs/layered-transfer.svg)"
        in text
    )
    assert "(https://example.org/we/it/blob/v9.1.0/SECURITY.md#set-up)" in text
    assert pages.blocks(text) == pages.blocks((ROOT / "README.md").read_text(encoding="utf-8"))  # no program is changed
    for target in targets:
        if target.startswith("https://example.org/"):
            assert (ROOT / target.split("/v9.1.0/")[1].partition("#")[0]).exists()


def test_the_package_of_an_index_names_its_repository(tmp_path: Path) -> None:
    index_page.prepare(checkout(tmp_path), "https://example.org/we/it", "v9.1.0")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"].pop("urls") == {
        "Repository": "https://example.org/we/it",
        "Documentation": "https://example.org/we/it/tree/v9.1.0/docs",
        "Changelog": "https://example.org/we/it/blob/v9.1.0/CHANGELOG.md",
        "Issues": "https://example.org/we/it/issues",
    }
    assert project == PYPROJECT
    with pytest.raises(SystemExit, match="must not have them yet"):
        index_page.prepare(tmp_path, "https://example.org/we/it", "v9.1.0")


@pytest.mark.parametrize(
    ("address", "version"), [("http://example.org/we/it", "v1"), ("/", "v1"), ("https://example.org/we/it", '"')]
)
def test_what_is_no_address_of_a_repository_is_refused(tmp_path: Path, address: str, version: str) -> None:
    with pytest.raises(SystemExit, match="must be https://HOST/OWNER/NAME"):
        index_page.prepare(checkout(tmp_path), address, version)
    assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()


def test_all_that_is_published_is_prepared_for_an_index_before_it_is_built() -> None:
    steps = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    for job in ("sdist", "wheel"):
        inside = steps.split(f"\n  {job}:\n")[1].split("\n  publish:" if job == "wheel" else "\n  wheel:\n")[0]
        build = "build --sdist" if job == "sdist" else "cibuildwheel --platform"
        assert 0 < inside.index("tests.index_page") < inside.index(build)


@pytest.mark.parametrize("folder", ["aiodatadist", "benchmarks", "examples"])
def test_no_message_says_to_install_an_extra_from_an_index_that_does_not_have_the_package(folder: str) -> None:
    saying = re.compile(r"pip install ['\"]?aiodatadist\[")
    files = [file for file in (ROOT / folder).rglob("*.py") if saying.search(file.read_text(encoding="utf-8"))]
    assert files == []


# ---- the workflows ----

PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
"""A commit, and the version that it is."""


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.name)
def test_workflow_is_pinned_bounded_and_may_write_nothing(file: Path) -> None:
    text = file.read_text()
    actions = re.findall(r"uses: (.+)", text)
    assert actions
    assert [action for action in actions if not PINNED.fullmatch(action)] == []
    assert text.count("runs-on:") == text.count("timeout-minutes:")
    assert "\npermissions:\n  contents: read\n" in text
    may_write = {"site.yml": ["pages", "id-token"], "wheels.yml": ["id-token"]}  # where each publishes
    assert re.findall(r"(\w[\w-]*): write", text) == may_write.get(file.name, [])
