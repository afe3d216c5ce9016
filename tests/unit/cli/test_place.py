"""On which devices a command runs: ``--device``, ``--device-ip`` and ``--local-comm-res``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from aiodatadist._cli.kit.errors import CommandError
from aiodatadist._cli.kit.place import Place, add_place_arguments, place_options, places
from aiodatadist._transport.local_device import parse_resource
from tests.vendor_names import resource


def said(*arguments: str, count: int = 2) -> list[Place]:
    parser = argparse.ArgumentParser()
    add_place_arguments(parser, count)
    return places(parser.parse_args(arguments), count)


def test_two_ends_are_two_devices_unless_said_otherwise() -> None:
    assert said() == [Place(device=0), Place(device=1)]
    assert said("--device", "5,0") == [Place(device=5), Place(device=0)]
    assert said(count=1) == [Place(device=0)]


def test_each_has_an_address_or_a_file_of_its_own(tmp_path: Path) -> None:
    assert [place.device_ip for place in said("--device-ip", "10.0.0.1,fd00::2")] == ["10.0.0.1", "fd00::2"]
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for number, file in enumerate(files):
        file.write_text(resource(number))
    found = said("--local-comm-res", ",".join(map(str, files)))
    assert [place.resource for place in found] == [resource(0), resource(1)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "0"], "--device 0 names 1: must name 2, with commas between them"),
        (["--device", "0,1,2"], "names 3"),
        (["--device", "0,-1"], "'-1' is not the number of a device"),
        (["--device", "a,b"], "'a' is not the number of a device"),
        (["--device-ip", "10.0.0.1"], "--device-ip 10.0.0.1 names 1"),
        (["--device-ip", "10.0.0.1,npu"], "'npu' is not an IP address"),
        (["--local-comm-res", "/nowhere/a,/nowhere/b"], "cannot read /nowhere/a"),
        (["--device-ip", "1.1.1.1,1.1.1.2", "--local-comm-res", "/dev/null,pyproject.toml"], "choose one"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        said(*arguments)
    assert caught.value.exit_code == 2


async def test_a_place_is_options_of_a_cluster() -> None:
    assert await place_options(Place(device=3)) == {"device_id": 3}
    assert await place_options(Place(device=3, resource="{}")) == {"device_id": 3, "local_comm_res": "{}"}
    options = await place_options(Place(device=3, device_ip="10.0.0.9"))
    found = parse_resource(options["local_comm_res"])
    assert (found["device_id"], found["device_ip"]) == ("3", "10.0.0.9")
    assert json.loads(options["local_comm_res"])["status"] == "completed"
