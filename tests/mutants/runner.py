"""Runs the tests that should notice a mutant, in a process where the mutated file takes the place of the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.lanes import ROOT

SITE = ROOT / "tests" / "mutants" / "site"
LIBRARY = "aiodatadist/_native/library.py"
HERE = "FOLDER = Path(__file__).resolve().parent\n"
"""The line of ``LIBRARY`` that says where the libraries of C are."""
CHAOS_SECONDS = 60


@dataclass(frozen=True)
class Mutant:
    """A change that breaks a promise.

    Attributes:
        name: one word, for the command line.
        promise: what must hold, and does not with this change.
        file: path from the root, a module of the package or a file of C in ``native``.
        old, new: text that stands in the file exactly once, and what takes its place.
        tests: what pytest is given: files, or single tests. One of them must fail.
        strict: ``SOFTNPU_STRICT`` of the run.
        chaos: a profile of ``aiodatadist chaos`` that finds it within ``CHAOS_SECONDS``, too; empty if none has to.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    strict: str = ""
    chaos: str = ""

    def mutated(self) -> str:
        """Return the file with the change. Raises ValueError if the old text is not there exactly once."""
        text = (ROOT / self.file).read_text()
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: its text is {times} times in {self.file}, it must be there once")
        return text.replace(self.old, self.new)


class Laboratory:
    """A folder with mutated files, and the libraries of C that were built from them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._native = folder / "native"
        self._build = folder / "build"

    def run(self, mutant: Mutant) -> subprocess.CompletedProcess[str]:
        """Run the tests of a mutant."""
        return self.run_tests(mutant.tests, mutant.strict, self._modules(mutant))

    def run_chaos(self, mutant: Mutant) -> subprocess.CompletedProcess[str]:
        """Run chaos with a mutant, with a new seed."""
        words = ("chaos", "--seconds", str(CHAOS_SECONDS), "--profile", mutant.chaos)
        return self._run(["-m", "aiodatadist", *words], "", self._modules(mutant))

    def run_tests(
        self, tests: tuple[str, ...], strict: str = "", modules: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run tests until the first failure, with some modules from other files."""
        words = ("-x", "-q", "-p", "no:cacheprovider", "--timeout", "30", *tests)
        return self._run(["-m", "pytest", *words], strict, modules or {})

    @staticmethod
    def _run(words: list[str], strict: str, modules: dict[str, str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "AIODATADIST_MUTANT": json.dumps(modules),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(SITE),
            "SOFTNPU_STRICT": strict,
        }
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def _modules(self, mutant: Mutant) -> dict[str, str]:
        return self._native_modules(mutant) if mutant.file.startswith("native/") else self._module(mutant)

    def _module(self, mutant: Mutant) -> dict[str, str]:
        file = self._folder / mutant.name / Path(mutant.file).name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(mutant.mutated())
        return {mutant.file.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."): str(file)}

    def _native_modules(self, mutant: Mutant) -> dict[str, str]:
        """Build the libraries with the change. Each build compiles what differs from the one before."""
        if not self._native.exists():
            shutil.copytree(ROOT / "native", self._native)
            self._make("-S", self._native, "-B", self._build, "-G", "Ninja")
        file = self._folder / mutant.file
        file.write_text(mutant.mutated())
        try:
            self._make("--build", self._build, "--target", "softnpu", "ring")
            libraries = self._folder / mutant.name
            libraries.mkdir(exist_ok=True)
            for name in ("libsoftnpu.so", "libring.so"):
                shutil.copy(self._build / name, libraries)
        finally:
            shutil.copy(ROOT / mutant.file, file)
        text = (ROOT / LIBRARY).read_text()
        if text.count(HERE) != 1:
            raise ValueError(f"{LIBRARY} has no line {HERE!r}")
        module = libraries / "library.py"
        module.write_text(text.replace(HERE, f"FOLDER = Path({str(libraries)!r})\n"))
        return {"aiodatadist._native.library": str(module)}

    @staticmethod
    def _make(*arguments: str | Path) -> None:
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = ["cmake", *map(str, arguments)]
        made = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{made.stdout}{made.stderr}")
