"""Scripts written for LLM-DataDist run unchanged, two processes each, and find the bytes where they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aiodatadist._testing.ports import free_port
from tests import children
from tests.machines.needs import need, why_not
from tests.machines.networks import address, cable, machines
from tests.profiles import at_night

HERE = Path(__file__).resolve().parent
TORCH = "aiodatadist: torch_npu is not installed: npu tensors are CPU tensors, and softnpu moves them\n"
SAMPLES = sorted(path.stem for path in HERE.glob("*_sample.py"))
WARNED = {"hixl_sample", "ranges_sample", "settings_sample"}
"""They do what their users are warned of."""
LINKS_ITS_OWN_WAY = {
    "hixl_sample", "kv_cache_manager_sample", "model_sample", "pull_blocks_sample", "push_blocks_sample",
    "ranges_sample", "rank_table_sample", "switch_role_sample",
}  # fmt: skip
"""What the others do, once linked, is the same between two machines as between two processes."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]
MACHINES = f"{address(1, 1)} {address(1, 2)}"
RUN = [sys.executable, "-m", "aiodatadist.blocking", "run"]


def play(sample: str, run: Sequence[Sequence[str]] = (RUN, RUN), **settings: str) -> list[str]:
    """Run both ends, each reading what the other prints, and return their stderr. What they assert is their exit code.

    Args:
        run: what the server's command begins with, and the client's.
    """
    port = str(free_port())
    from_server, to_client = os.pipe()
    from_client, to_server = os.pipe()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **settings}  # as torchrun has it
    server, client = (
        children.Popen(
            [*command, str(HERE / f"{sample}.py"), role, port],
            env=env,
            stdin=heard,
            stdout=told,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, role, heard, told in zip(
            run, ("server", "client"), (from_client, from_server), (to_client, to_server), strict=True
        )
    )
    for end in (from_server, to_client, from_client, to_server):
        os.close(end)
    with server, client:
        try:
            words = [client.communicate(timeout=40)[1], server.communicate(timeout=40)[1]]
        finally:
            server.kill()
            client.kill()
    assert (client.returncode, server.returncode) == (0, 0), "\n".join(words)
    return words


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_script_of_the_vendors_library_runs_unchanged(sample: str) -> None:
    is_torchs = sample.startswith("torch")
    if is_torchs and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    told = TORCH if is_torchs and find_spec("torch_npu") is None else ""
    assert play(sample) == [told, told] if sample not in WARNED else not unexpected(play(sample))


def unexpected(words: list[str]) -> list[str]:
    """Return the lines that are neither warnings of a cluster or an engine nor of torch.distributed."""
    return [line for each in words for line in each.splitlines() if not line.startswith(("cluster ", "hixl", "[W"))]


# ---- two machines ----


@pytest.fixture(scope="module")
def two_machines() -> Iterator[list[list[str]]]:
    """Two machines with a cable between them; what a command that runs a script on each begins with."""
    need(why_not())
    with machines("a", "b") as (a, b):
        cable(a, b)
        inside = [sys.executable, "-m", "tests.machines.inside"]
        yield [[*inside, each.namespace, "aiodatadist.blocking", "run"] for each in (a, b)]


@pytest.mark.parametrize(
    "sample",
    [
        s if s in LINKS_ITS_OWN_WAY or s.startswith("torch") else at_night(s)
        for s in SAMPLES
        if s != "connector_sample"  # whose rank table has one machine
    ],
)
def test_it_does_so_between_two_machines(sample: str, two_machines: list[list[str]], tmp_path: Path) -> None:
    if sample.startswith("torch") and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    key = tmp_path / "key"
    key.write_text("a secret of many characters", encoding="ascii")
    key.chmod(0o600)
    with TemporaryDirectory(prefix="npu") as meeting:
        settings = {
            "SAMPLE_HOSTS": MACHINES,
            "MASTER_ADDR": MACHINES.split(maxsplit=1)[0],
            "GLOO_SOCKET_IFNAME": "net1",
        }
        words = play(sample, two_machines, SOFTNPU_RENDEZVOUS=meeting, AIODATADIST_AUTH_KEY_FILE=str(key), **settings)
    assert [line for line in unexpected(words) if f"{line}\n" != TORCH] == []


def test_no_sample_knows_who_runs_it() -> None:
    assert len(SAMPLES) == 19
    assert not [
        path.name for path in HERE.glob("*sample*.py") if path != Path(__file__) and "aiodatadist" in path.read_text()
    ]


def run_text(
    text: str, *args: str, folder: Path, run: Run = children.run, seconds: float = 40
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return run(
        [*RUN, str(script), *args], capture_output=True, text=True, check=False, timeout=seconds, cwd=folder.parent
    )


def test_a_script_has_its_arguments_its_folder_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("word = 'found'", encoding="utf-8")
    text = "import sys, neighbour; print(__name__, sys.argv[1:], neighbour.word); sys.exit(7)"
    done = run_text(text, "--flag", "x", folder=tmp_path, run=subprocess.run)
    assert done.stdout == "__main__ ['--flag', 'x'] found\n", done.stderr
    assert done.returncode == 7


def test_every_way_of_importing_the_library_finds_ours(tmp_path: Path) -> None:
    text = """
from llm_datadist import *
from llm_datadist.v2.llm_types import Cache as SameCache, Memtype
from llm_datadist.status import LLMStatusCode as SameCode
from llm_datadist.configs import LLMRole as SameRole
import llm_datadist, llm_datadist_v1
assert LLMDataDist is llm_datadist.LLMDataDist is llm_datadist_v1.LLMDataDist
from llm_datadist_v1 import CapacityState, KvCache, KvCacheManager, LLMModel, LLMReq, ModelConfig, ModelRunner
from llm_datadist.data_type import DataType as SameType
assert SameCache is Cache and SameCode is LLMStatusCode and SameRole is LLMRole and SameType is DataType
assert KvCacheManager is llm_datadist.KvCacheManager and Tensor is llm_datadist.Tensor and TensorDesc
print(LLMDataDist.__module__)
"""
    done = run_text(text, folder=tmp_path)
    assert done.stdout == "aiodatadist._blocking.datadist\n", done.stderr


def test_torch_is_optional_and_its_absence_is_said_once(tmp_path: Path) -> None:
    text = """
import sys
sys.path[:] = [p for p in sys.path if not p.endswith("-packages")]
for name in ("torch", "torch_npu", "torch"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    done = run_text(text, folder=tmp_path)
    assert done.stdout == "torch\ntorch_npu\ntorch\n"
    assert done.stderr == (
        "aiodatadist: torch is not installed: caches can be made of addresses, numpy arrays and buffers\n"
    )


def test_scripts_of_context_caching_find_it_under_its_own_name(tmp_path: Path) -> None:
    text = """
from ems import CcConfig, CcKvOption, ContextCaching, Ems, EmsConfig, KvBufferWrapper
from ems.common.exception import EmsException, EmsInvalidArgument
import ems, ems.common
assert ems.CcKvOption is CcKvOption and ems.EmsException is EmsException
try:
    CcKvOption(timeout=-1)
except EmsInvalidArgument as error:
    print(CcKvOption.__module__)
"""
    done = run_text(text, folder=tmp_path)
    assert done.stdout == "aiodatadist._context_caching.ems\n", done.stderr


CHILD = "import llm_datadist, ems; print(llm_datadist.LLMDataDist.__module__)"


@pytest.mark.timeout(200)
def test_processes_that_a_script_starts_find_the_library_too(tmp_path: Path) -> None:
    text = f"""
import multiprocessing, os, subprocess, sys

def work():
    import llm_datadist
    assert llm_datadist.LLMDataDist.__module__ == "aiodatadist._blocking.datadist"

if __name__ == "__main__":
    print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True).stdout, end="")
    os.chdir("/")
    print(subprocess.run(f"{{sys.executable}} -c '{CHILD}'", shell=True, capture_output=True, text=True).stdout, end="")
    for method in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
        child.join()
        print(method, child.exitcode)
"""
    done = run_text(text, folder=tmp_path, seconds=190)
    ours = "aiodatadist._blocking.datadist\n"
    assert done.stdout == ours + ours + "spawn 0\nforkserver 0\nfork 0\n", done.stderr


def test_a_child_that_imports_nothing_of_it_pays_nothing_and_keeps_its_own_sitecustomize(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = True", encoding="utf-8")
    look = "import sys; print(sys.own, [name for name in sys.modules if name.startswith('aiodatadist')])"
    text = f"""
import os, subprocess, sys
os.environ["PYTHONPATH"] += os.pathsep + {str(own)!r}
print(subprocess.run([sys.executable, "-c", {look!r}], capture_output=True, text=True, check=True).stdout, end="")
"""
    assert run_text(text, folder=tmp_path).stdout == "True []\n"


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_processes_of_torchrun_find_it(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import torch, torch_npu, torch.distributed as dist, llm_datadist\n"
        "dist.init_process_group('gloo'); dist.barrier(); torch.npu.set_device(dist.get_rank())\n"
        "open(f'{__file__}.{dist.get_rank()}', 'w').write(llm_datadist.LLMDataDist.__module__)\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    text = f"""
import subprocess, sys
launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", {str(worker)!r}]
subprocess.run([sys.executable, *launch], check=True)
"""
    done = run_text(text, folder=tmp_path)
    found = [(tmp_path / f"worker.py.{rank}").read_text() for rank in range(2)]
    assert found == ["aiodatadist._blocking.datadist"] * 2, done.stderr


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "nowhere.py"], ["walk", "x.py"]])
def test_a_wrong_command_is_told_what_is_wrong(arguments: list[str]) -> None:
    done = children.run([*RUN[:-1], *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: python -m aiodatadist.blocking" in done.stderr
