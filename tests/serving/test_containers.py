"""The manifests of ``examples/containers``: their fields, what they promise, and their commands, which run here."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from aiodatadist._config.trust import KEYS, VARIABLE
from aiodatadist._testing.ports import free_port
from tests.profiles import at_night
from tests.serving.kubernetes import COMPOSE, faults, faults_of_object
from tests.serving.processes import DIRECT, ROOT, Job, Service, eventually, expected

FOLDER = ROOT / "examples" / "containers"
KUBERNETES = "one-pod.yaml", "npu.yaml"
SERVICES = "prefill", "decode", "router"
Object = dict[str, Any]


def objects(name: str, kind: str = "") -> list[Object]:
    found = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    return [each for each in found if not kind or each["kind"] == kind]


def compose() -> Object:
    found: Object = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    return found


def pods(name: str) -> list[Object]:
    return [each["spec"]["template"] for each in objects(name) if "template" in each["spec"]]


def containers(name: str) -> dict[str, Object]:
    return {each["name"]: each for pod in pods(name) for each in pod["spec"]["containers"]}


# ---- what is written ----


def test_compose_has_only_fields_that_compose_knows() -> None:
    assert list(faults(COMPOSE, compose())) == []


@pytest.mark.parametrize("name", KUBERNETES)
def test_objects_have_only_fields_that_kubernetes_knows(name: str) -> None:
    assert len(objects(name)) >= 3
    assert [fault for each in objects(name) for fault in faults_of_object(each)] == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "replica"), 1, "Deployment.spec: has no field 'replica'"),
        (("spec", "replicas"), "1", "Deployment.spec.replicas: '1' is no int"),
        (("spec", "replicas"), True, "Deployment.spec.replicas: True is no int"),
        (("spec", "template"), None, "Deployment.spec.template: None is no dict"),
        (("spec", "strategy", "type"), "Rolling", "Deployment.spec.strategy.type: 'Rolling' is none of"),
        (("metadata",), {}, "Deployment.metadata: needs 'name'"),
        (("spec", "template", "spec", "containers"), {}, "Deployment.spec.template.spec.containers: {} is no list"),
        (("spec", "selector", "matchLabels"), {"app": 1}, "Deployment.spec.selector.matchLabels.app: 1 is no str"),
        (("kind",), "Deploy", "('apps/v1', 'Deploy') is no kind"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str, ...], value: Any, fault: str) -> None:
    (deployment,) = objects("one-pod.yaml", "Deployment")
    *outer, last = path
    inner = deployment
    for name in outer:
        inner = inner[name]
    inner[last] = value
    (found,) = faults_of_object(deployment)
    assert found.startswith(fault)


@pytest.mark.parametrize("name", KUBERNETES)
def test_no_container_is_root_or_can_write_or_is_without_limit(name: str) -> None:
    for pod in pods(name):
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["terminationGracePeriodSeconds"] > 2 * 20, "--shutdown-seconds, for requests and for leases"
    assert set(containers(name)) == set(SERVICES)
    for each in containers(name).values():
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["resources"]["limits"]["memory"] == each["resources"]["requests"]["memory"]


def test_no_service_of_compose_is_root_or_can_write_or_is_without_limit() -> None:
    assert set(compose()["services"]) == set(SERVICES)
    for each in compose()["services"].values():
        assert each["user"] == "1000:1000"
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
        assert each["mem_limit"]


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_keys_are_a_secret_that_is_mounted_where_trust_is(name: str) -> None:
    for pod in pods(name):
        volumes = pod["spec"].get("volumes", [])
        secrets = {volume["name"] for volume in volumes if volume["secret"]["defaultMode"] == 0o440}
        for each in pod["spec"]["containers"]:
            mounts = {
                mount["mountPath"]
                for mount in each.get("volumeMounts", [])
                if mount["readOnly"] and mount["name"] in secrets
            }
            trust = {variable["value"] for variable in each.get("env", []) if variable["name"] == VARIABLE}
            assert trust == mounts
            assert bool(trust) is (each["name"] != "router")


def test_the_keys_of_compose_are_where_trust_is() -> None:
    for name, each in compose()["services"].items():
        assert (each.get("environment") == {VARIABLE: "/run/secrets"}) is (name != "router")
        assert [secret["target"] for secret in each.get("secrets", [])] == ([KEYS] if name != "router" else [])


def test_ends_without_npus_see_each_others_processes_and_sockets() -> None:
    (pod,) = pods("one-pod.yaml")
    assert pod["spec"]["shareProcessNamespace"]
    decode = compose()["services"]["decode"]
    assert (decode["pid"], decode["network_mode"]) == ("service:prefill", "service:prefill")


@pytest.mark.parametrize("name", KUBERNETES)
def test_services_and_policies_name_ports_and_pods_that_exist(name: str) -> None:
    labelled = {pod["metadata"]["labels"]["app"]: pod["spec"]["containers"] for pod in pods(name)}
    ports = {
        app: {
            port for each in pod for given in each.get("ports", []) for port in (given["containerPort"], given["name"])
        }
        for app, pod in labelled.items()
    }
    for service in objects(name, "Service"):
        spec = service["spec"]
        assert {port.get("targetPort", port["port"]) for port in spec["ports"]} <= ports[spec["selector"]["app"]]
    policies = objects(name, "NetworkPolicy")
    assert {policy["spec"]["podSelector"]["matchLabels"]["app"] for policy in policies} == set(labelled)
    for policy in policies:
        own = ports[policy["spec"]["podSelector"]["matchLabels"]["app"]]
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= own
            assert {peer["podSelector"]["matchLabels"]["app"] for peer in rule.get("from", [])} <= set(labelled)


def test_the_image_has_what_the_commands_run() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (examples\S+) ", text, flags=re.MULTILINE)
    assert copied == ["examples/__init__.py", "examples/serving"]
    assert all((ROOT / path).exists() for path in copied)
    assert "USER 1000:1000" in text


# ---- what runs ----


@dataclass
class Command:
    """A container's command and its probes, with names of the cluster as they are on this machine."""

    name: str
    words: list[str]
    probes: list[Object] = field(default_factory=list)


def _options(words: list[str], name: str) -> list[str]:
    return [after for word, after in itertools.pairwise(words) if word == name]


def commands(name: str) -> Iterator[Command]:
    if name == "compose.yaml":
        for service, found in compose()["services"].items():
            probe = {"exec": {"command": found["healthcheck"]["test"][1:]}}
            yield Command(service, found["command"], [probe])
        return
    for each in containers(name).values():
        yield Command(each["name"], [*each["command"], *each["args"]], [each["readinessProbe"], each["livenessProbe"]])


class Here:
    """Replaces ports and hosts by those of this machine."""

    def __init__(self) -> None:
        self._ports = {port: str(free_port()) for port in ("8000", "8001", "8002", "26001")}

    def __call__(self, text: str) -> str:
        text = text.replace("$(POD_INDEX)", "0")
        text = re.sub(r"\$\(POD_IP\)|0\.0\.0\.0|(?<=//)[a-z][\w.-]*(?=:)|(?<=@)[a-z][\w.-]*(?=:)", "127.0.0.1", text)
        return re.sub(r"\b(8000|8001|8002|26001)\b", lambda port: self._ports[port[0]], text)


def succeeds(probe: Object, here: Here, service: Service) -> bool:
    if "exec" in probe:
        words = [here(word) for word in probe["exec"]["command"]]
        assert words[0] == "python"
        return (
            subprocess.run([sys.executable, *words[1:]], check=False, capture_output=True, timeout=30).returncode == 0
        )
    if "httpGet" in probe:
        return httpx.get(service.url + probe["httpGet"]["path"], **DIRECT).status_code == 200
    return httpx.get(f"{service.url}/metrics", **DIRECT).status_code == 200  # its port takes a connection


@pytest.mark.parametrize("name", ["one-pod.yaml", at_night("compose.yaml"), at_night("npu.yaml")])
def test_the_commands_answer_a_request_and_the_probes_succeed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    keys = tmp_path / KEYS
    keys.touch(mode=0o600)
    keys.write_text(f"first {'5a' * 32}\n", encoding="ascii")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    here, job = Here(), Job(prompt="Once", max_tokens=8)
    found = list(commands(name))
    with ExitStack() as stack:
        started: dict[str, Service] = {}
        for command in found:
            python, dash_m, *words = [here(word) for word in command.words]
            assert (python, dash_m) == ("python", "-m")
            (port,) = _options(words, "--port")
            started[command.name] = stack.enter_context(closing(Service(_without(words, "--port"), port)))
        for service in started.values():
            service.wait_ready()
        eventually(
            lambda: all(succeeds(probe, here, started[each.name]) for each in found for probe in each.probes), True
        )
        answer = httpx.post(f"{started['router'].url}/v1/completions", json=job, **DIRECT, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected(job)


def _without(words: list[str], option: str) -> list[str]:
    place = words.index(option)
    return words[:place] + words[place + 2 :]
