"""The programs of C that read input from others, built with ASan and UBSan: with libFuzzer if clang is there."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = ROOT / "native"
BUILD = ROOT / "build" / "fuzz" / "native"
PROGRAMS = {path.stem.removeprefix("fuzz_"): path for path in sorted((NATIVE / "fuzz").glob("fuzz_*.c"))}
"""By name."""
FLAGS = (
    "-std=gnu11", "-D_GNU_SOURCE", "-g1", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread",
    f"-I{NATIVE}", f"-I{NATIVE / 'softnpu'}",
    *(f"-I{NATIVE / 'softnpu' / room}" for room in ("base", "memory", "execution", "sharing", "hccl")),
)  # fmt: skip


def has_libfuzzer() -> bool:
    """Return True if there is a clang that links libFuzzer."""
    if shutil.which("clang") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "none.c")
        source.write_text(
            "int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return (int)(n * 0 + !d * 0); }\n"
        )
        command = ["clang", "-fsanitize=fuzzer,address", str(source), "-o", str(Path(folder, "none"))]
        return not subprocess.run(command, check=False, capture_output=True).returncode


def built(name: str) -> Path:
    """Build a program if its sources are newer, and return it. Raises CalledProcessError."""
    program = BUILD / name
    sources = [*sorted((NATIVE / "softnpu").rglob("*.c")), NATIVE / "big_copy.c", NATIVE / "mapped.c", PROGRAMS[name]]
    compiler = ["clang", "-fsanitize=fuzzer-no-link,address,undefined", "-Wno-everything"]
    ends = ["-fsanitize=fuzzer,address,undefined"]
    if not has_libfuzzer():
        compiler, ends = ["gcc", "-fsanitize=address,undefined", "-w"], ["-fsanitize=address,undefined"]
        sources.append(NATIVE / "fuzz" / "driver.c")
    headers = max(path.stat().st_mtime for path in NATIVE.rglob("*.h"))
    BUILD.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        target = BUILD / f"{compiler[0]}-{'-'.join(source.relative_to(NATIVE).parts)}.o"
        if not target.exists() or target.stat().st_mtime < max(headers, source.stat().st_mtime):
            subprocess.run([*compiler, *FLAGS, "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compiled, sources))
    subprocess.run([compiler[0], *ends, "-pthread", *map(str, objects), "-ldl", "-o", str(program)], check=True)
    return program
