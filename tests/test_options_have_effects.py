"""An option that is accepted does something, or a warning says why it does not."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import aiodatadist
from aiodatadist import LLMConfig, LLMDataDist, LLMRole, RegisterMemStatus, legacy
from aiodatadist._config.remarks import WITHOUT_EFFECT
from aiodatadist._native.library import Handle, ffi
from aiodatadist._transport.communicator import Communicator
from aiodatadist.testing import linked_pair, open_cluster
from tests.test_pull import BLOCKS
from tests.test_symmetric_links import link_all, settled

GIVEN: dict[str, str | int] = {
    "global_resource_config": "{}",
    "deploy_res_path": "/opt",
    "cluster_info": "{}",
    "output_max_size": 7,
}


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    """Collect the communicators of all channels, as they are made."""
    made: list[Communicator] = []
    make = Communicator.make

    def remember(self: Communicator, rank_table: str, rank: int, config: Handle) -> None:
        make(self, rank_table, rank, config)
        made.append(self)

    monkeypatch.setattr(Communicator, "make", remember)
    return made


def rdma_of(communicator: Communicator) -> tuple[int, int]:
    """Return the RDMA settings that softnpu was given."""
    found = ffi.new("uint32_t[2]")
    assert communicator._runtime.acl.softnpu_comm_rdma(communicator.handle, found, found + 1) == 0
    return found[0], found[1]


async def test_rdma_options_reach_the_communicators_of_a_link(communicators: list[Communicator]) -> None:
    async with linked_pair(BLOCKS, rdma_traffic_class=64, rdma_service_level=7):
        assert [rdma_of(each) for each in communicators] == [(64, 7), (64, 7)]


async def test_rdma_is_the_environments_unless_it_is_an_option(
    communicators: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_RDMA_TC", "252")
    monkeypatch.setenv("HCCL_RDMA_SL", "1")
    async with linked_pair(BLOCKS, rdma_service_level=0):
        assert [rdma_of(each) for each in communicators] == [(252, 0), (252, 0)]


async def test_rdma_options_reach_the_communicator_in_which_members_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """softnpu refuses a bad environment, and looks at it only where no option says otherwise."""
    monkeypatch.setenv("HCCL_RDMA_TC", "1")
    options: dict[str, Any] = {"listen_ip_info": None, "rdma_traffic_class": 0}
    async with open_cluster(1, **options) as one, open_cluster(2, device_id=1, **options) as two:
        await link_all(one, two)
        assert await settled(one, 1) is await settled(two, 1) is RegisterMemStatus.OK


# ---- options without an effect ----


def test_all_of_them_are_tried() -> None:
    assert GIVEN.keys() == WITHOUT_EFFECT.keys()


@pytest.mark.parametrize("name", GIVEN)
async def test_a_warning_says_once_why_an_option_has_no_effect(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = LLMConfig(listen="127.0.0.1:0", **{name: GIVEN[name]})  # type: ignore[arg-type]
    async with LLMDataDist(LLMRole.MIX, 3, config):
        pass
    assert warnings(caplog) == [f"cluster 3: {name} has no effect: {WITHOUT_EFFECT[name]}"]


async def test_the_graph_engines_options_are_named(caplog: pytest.LogCaptureFixture) -> None:
    options = {"ge.flowGraphMemMaxSize": "1048576", "ge.some": "1"}
    async with LLMDataDist(LLMRole.MIX, 3, LLMConfig(ge_options=options)):
        pass
    assert warnings(caplog) == ["cluster 3: option 'ge.some' has no effect: there is no graph engine here"]


async def test_what_hccl_would_not_take_is_kept_and_named(caplog: pytest.LogCaptureFixture) -> None:
    config = LLMConfig(rdma_traffic_class=133, rdma_service_level=2**32 - 1, ge_options={"llm.Nonsense": "1"})
    async with LLMDataDist(LLMRole.MIX, 3, LLMConfig.from_options(config.generate_options())):
        pass
    assert warnings(caplog) == [
        "cluster 3: rdma_traffic_class has no effect: it is 133, and must be a multiple of 4 in [0, 255]",
        "cluster 3: rdma_service_level has no effect: it is 4294967295, and must be in [0, 7]",
        "cluster 3: option 'llm.Nonsense' has no effect: it is not known here",
    ]


async def test_what_is_beyond_the_manual_does_not_reach_hccl(communicators: list[Communicator]) -> None:
    async with linked_pair(BLOCKS, rdma_traffic_class=256, rdma_service_level=8):
        assert [rdma_of(each) for each in communicators] == [(132, 4), (132, 4)]


async def test_v1_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(1):
        pass
    assert warnings(caplog) == []
    datadist = legacy.LLMDataDist(LLMRole.DECODER, 3)
    await datadist.init({"llm.deployResPath": "/opt", "ge.flowGraphMemMaxSize": "1048576"})
    await datadist.finalize()
    assert warnings(caplog) == [f"cluster 3: deploy_res_path has no effect: {WITHOUT_EFFECT['deploy_res_path']}"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name != "asyncio"
    ]


PACKAGE = Path(aiodatadist.__file__).parent


def read_outside_config() -> str:
    """Return the text of the package's files, except those that only declare and check options."""
    files = [path for path in PACKAGE.rglob("*.py") if "config" not in path.relative_to(PACKAGE).parts]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_every_option_is_in_the_docstring() -> None:
    described = LLMConfig.__doc__ or ""
    assert [name for name in LLMConfig.model_fields if not re.search(rf"\b{name}\b[^.]*?:", described)] == []


def test_every_option_is_read_or_has_its_reason() -> None:
    text = read_outside_config()
    unread = {name for name in LLMConfig.model_fields if not re.search(rf"\.{name}\b", text)}
    assert unread - {"listen_ip_info"} <= set(WITHOUT_EFFECT)  # that one is read as listen_address
