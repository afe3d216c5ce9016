"""The wheel in a bare Debian, where there is Python and no compiler: what `Dockerfile` makes, without Docker.

Run as ``python -m tests.bare_root``, as root, where mmdebstrap is installed. The Debian is made once, in a folder of
``.cache``, from a mirror. The wheel and what it needs are installed there as the first stage of `Dockerfile` does it. The
last stage is carried out as it is written, and so is its command: ``aiodatadist demo``, by a user who is not root, in
namespaces of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import packaging

DOCKERFILE = packaging.ROOT / "Dockerfile"
CACHE = packaging.ROOT / ".cache" / "bare-root"
PLACE = "/opt/aiodatadist"
COMPILERS = ("as", "c99", "cc", "clang", "cmake", "g++", "gcc", "ld", "make", "tcc")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")


@dataclass
class Stage:
    """A stage of a Dockerfile, as far as it matters to what runs in it."""

    base: str
    runs: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    command: list[str] = field(default_factory=list)


def stages(text: str) -> list[Stage]:
    """Parse a Dockerfile into its stages. Raises ValueError if an instruction is not known here."""
    found: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#") or word == "ARG":
            continue
        if word == "FROM":
            found.append(Stage(rest.partition(" ")[0]))
            continue
        stage = found[-1]
        match word:
            case "RUN":
                stage.runs.append(rest)
            case "COPY":
                stage.copies.append(rest)
            case "ENV":
                name, _, value = rest.partition("=")
                stage.environment[name] = value
            case "USER":
                stage.user = rest
            case "WORKDIR":
                stage.folder = rest
            case "CMD":
                stage.command = json.loads(rest)
            case _:
                raise ValueError(f"{DOCKERFILE} has {word}, which {Path(__file__).name} does not know")
    return found


@dataclass(frozen=True)
class Root:
    """A folder with a Debian in it."""

    folder: Path

    def command(self, command: Sequence[str], stage: Stage) -> list[str]:
        """Return the command for ``subprocess``. It runs in its own mount and process namespaces, which end with it."""
        given = {"PATH": PATH, "LANG": "C.UTF-8", **stage.environment}
        environment = [f"{name}={value.replace('$PATH', PATH)}" for name, value in given.items()]
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.folder}/proc"]
        inside = ["chroot", f"--userspec={stage.user}", str(self.folder), "env", "-i", f"--chdir={stage.folder}"]
        return [*isolated, *inside, *environment, *command]

    def run(self, *command: str, stage: Stage) -> None:
        """Run a command in the root. Raises CalledProcessError if it fails."""
        subprocess.run(self.command(command, stage), check=True)

    def output(self, *command: str, stage: Stage) -> str:
        """Run a command in the root and return its output. Raises CalledProcessError if it fails."""
        return subprocess.run(self.command(command, stage), check=True, stdout=subprocess.PIPE, text=True).stdout

    def compilers(self) -> list[str]:
        """Return the programs in the root that build others."""
        return sorted(name for name in COMPILERS for place in FOLDERS if (self.folder / place / name).exists())


def archive_of(suite: str) -> Path:
    """Return a Debian with Python, as small as possible. It is made if it is not there yet."""
    archive = CACHE / f"{suite}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = CACHE / f"{suite}.new.tar"
        include = "--include=ca-certificates,netbase,python3-venv,tzdata"  # what python:slim has besides
        packaging.run("mmdebstrap", "--quiet", "--variant=minbase", include, suite, unfinished)
        unfinished.rename(archive)
    return archive


def gather(wheel: Path, root: Root, stage: Stage) -> None:
    """Put the wheels of the package and of all that it needs into /wheels. The Python in the root builds none."""
    asked = "import os, sys; print(*sys.version_info[:2], os.confstr('CS_GNU_LIBC_VERSION').split('.')[-1])"
    major, minor, glibc = map(int, root.output("python3", "-c", asked, stage=stage).split())
    tags = [f"manylinux_2_{n}_{platform.machine()}" for n in range(glibc, 4, -1)]
    tags += [f"{name}_{platform.machine()}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    packaging.run(
        *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--only-binary=:all:"),
        *(
            "--implementation=cp",
            f"--python-version={major}.{minor}",
            f"--abi=cp{major}{minor}",
            "--abi=abi3",
            "--abi=none",
        ),
        *(f"--platform={tag}" for tag in tags),
        *("--dest", root.folder / "wheels", f"{wheel}[demo]"),
    )


def install(root: Root, stage: Stage) -> None:
    """Install as the first stage does, but from the wheels that are there."""
    root.run("python3", "-m", "venv", PLACE, stage=stage)
    pip = (f"{PLACE}/bin/pip", "--disable-pip-version-check", "--quiet", "install", "--no-cache-dir")
    root.run(*pip, "--no-index", "--find-links", "/wheels", "aiodatadist[demo]", stage=stage)
    shutil.rmtree(root.folder / "wheels")


def carry_out(root: Root, stage: Stage) -> None:
    """Run the last stage and its command.

    Raises CalledProcessError if a command fails, and Wrong if the demo's proof failed or the command runs as root.
    """
    for line in stage.runs:
        root.run("/bin/sh", "-c", line, stage=Stage(stage.base, environment=stage.environment))
    if root.output("id", "-u", stage=stage).strip() == "0":
        raise packaging.Wrong(f"{DOCKERFILE} leaves its command to root")
    root.run("aiodatadist", "--version", stage=stage)
    root.run("aiodatadist", "doctor", stage=stage)
    root.run(*stage.command, stage=stage)
    summary = json.loads(root.output(*stage.command, "--json", stage=stage))
    if not (summary["tokens_equal"] and summary["kv_equal"]):
        raise packaging.Wrong(f"the demo: {summary}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bare_root", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="bookworm", help="of Debian (bookworm, which has Python 3.11)")
    parser.add_argument("--wheel", type=Path, help="instead of one that is built now")
    arguments = parser.parse_args()
    if os.geteuid() or not shutil.which("mmdebstrap"):
        sys.exit("tests.bare_root needs root, for chroot, and mmdebstrap: apt-get install mmdebstrap")
    with tempfile.TemporaryDirectory(prefix="bare-root-") as name:
        folder = Path(name)
        wheel = arguments.wheel or packaging.checked(folder)
        root = Root(folder / "root")
        root.folder.mkdir(mode=0o755)
        folder.chmod(0o755)  # a user of the root has to get there
        packaging.run("tar", "--extract", "--numeric-owner", "--file", archive_of(arguments.suite), cwd=root.folder)
        first, *_, last = stages(DOCKERFILE.read_text(encoding="utf-8"))
        building = Stage(first.base)
        gather(wheel.resolve(), root, building)
        install(root, building)
        if root.compilers():
            raise packaging.Wrong(f"there are {root.compilers()}: that is not a bare root")
        carry_out(root, last)
    print(f"{wheel.name} works in a bare {arguments.suite}, without a compiler and without root")


if __name__ == "__main__":
    main()
