"""The fields of Kubernetes' and Compose's objects that the manifests may use, and a check of a manifest against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Map:
    """Any names, with values of one shape."""

    values: Any


@dataclass(frozen=True)
class Either:
    """A choice between shapes or constants."""

    choices: tuple[Any, ...]


def either(*choices: Any) -> Either:
    return Either(choices)


QUANTITY = either(str, int)
PORT = either(int, str)
LABELS = Map(str)
META = {"name!": str, "labels": LABELS}
SELECTOR = {"matchLabels!": LABELS}

PROBE = {
    "exec": {"command!": [str]},
    "httpGet": {"path!": str, "port!": PORT},
    "tcpSocket": {"port!": PORT},
    "initialDelaySeconds": int,
    "periodSeconds": int,
    "timeoutSeconds": int,
}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str, "valueFrom": {"fieldRef!": {"fieldPath!": str}}}],
    "ports": [{"name": str, "containerPort!": int}],
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "capabilities": {"drop": [str]},
    },
    "resources": {"requests": Map(QUANTITY), "limits": Map(QUANTITY)},
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
}
POD = {
    "metadata!": {"labels!": LABELS},
    "spec!": {
        "shareProcessNamespace": bool,
        "automountServiceAccountToken": bool,
        "enableServiceLinks": bool,
        "terminationGracePeriodSeconds": int,
        "securityContext": {
            "runAsNonRoot": bool,
            "runAsUser": int,
            "runAsGroup": int,
            "fsGroup": int,
            "seccompProfile": {"type!": either("RuntimeDefault", "Unconfined", "Localhost")},
        },
        "containers!": [CONTAINER],
        "volumes": [{"name!": str, "secret": {"secretName!": str, "defaultMode": int}}],
    },
}
DEPLOYMENT = {
    "replicas": int,
    "strategy": {"type!": either("Recreate", "RollingUpdate")},
    "selector!": SELECTOR,
    "template!": POD,
}
STATEFUL_SET = {"serviceName!": str, "replicas": int, "selector!": SELECTOR, "template!": POD}
SERVICE = {
    "clusterIP": either("None"),
    "publishNotReadyAddresses": bool,
    "selector!": LABELS,
    "ports!": [{"name": str, "port!": int, "targetPort": PORT}],
}
POLICY_PORTS = [{"protocol": either("TCP", "UDP", "SCTP"), "port!": PORT}]
POLICY_PEERS = [{"podSelector": SELECTOR, "namespaceSelector": SELECTOR}]
NETWORK_POLICY = {
    "podSelector!": SELECTOR,
    "policyTypes": [either("Ingress", "Egress")],
    "ingress": [{"from": POLICY_PEERS, "ports": POLICY_PORTS}],
    "egress": [{"to": POLICY_PEERS, "ports": POLICY_PORTS}],
}
KINDS = {
    ("apps/v1", "Deployment"): DEPLOYMENT,
    ("apps/v1", "StatefulSet"): STATEFUL_SET,
    ("v1", "Service"): SERVICE,
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICY,
}

COMPOSE = {
    "name": str,
    "services!": Map(
        {
            "image!": str,
            "command": [str],
            "environment": Map(str),
            "secrets": [{"source!": str, "target": str}],
            "user": str,
            "read_only": bool,
            "cap_drop": [str],
            "security_opt": [str],
            "mem_limit": str,
            "network_mode": str,
            "pid": str,
            "ports": [str],
            "depends_on": [str],
            "stop_grace_period": str,
            "healthcheck": {"test!": [str], "interval": str, "timeout": str},
        }
    ),
    "secrets": Map({"file!": str}),
}


def faults(shape: Any, found: Any, where: str = "") -> Iterator[str]:
    """Yield what in ``found`` does not have the shape.

    A shape is a type, a constant, a list of one shape, or a dict of shapes in which needed names end in ``!``.
    """
    if isinstance(shape, Either):
        if all(list(faults(choice, found)) for choice in shape.choices):
            yield f"{where}: {found!r} is none of {shape.choices}"
    elif isinstance(shape, Map):
        yield from faults(dict, found, where)
        for name, value in found.items() if isinstance(found, dict) else ():
            yield from faults(shape.values, value, f"{where}.{name}")
    elif isinstance(shape, dict):
        yield from _faults_of_fields(shape, found, where)
    elif isinstance(shape, list):
        yield from faults(list, found, where)
        for number, entry in enumerate(found if isinstance(found, list) else ()):
            yield from faults(shape[0], entry, f"{where}[{number}]")
    elif isinstance(shape, type):
        if type(found) is not shape:  # a bool is no int here
            yield f"{where}: {found!r} is no {shape.__name__}"
    elif found != shape:
        yield f"{where}: {found!r} is not {shape!r}"


def _faults_of_fields(shape: dict[str, Any], found: Any, where: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{where}: {found!r} is no dict"
        return
    fields = {name.removesuffix("!"): field for name, field in shape.items()}
    for name in sorted(found.keys() - fields.keys(), key=str):
        yield f"{where}: has no field {name!r}"
    for name in (name[:-1] for name in shape if name.endswith("!")):
        if name not in found:
            yield f"{where}: needs {name!r}"
    for name, value in found.items():
        if name in fields:
            yield from faults(fields[name], value, f"{where}.{name}")


def faults_of_object(found: Any) -> Iterator[str]:
    """Yield the faults of one object of Kubernetes, whose ``kind`` says which fields it has."""
    key = (found.get("apiVersion"), found.get("kind")) if isinstance(found, dict) else (None, None)
    if key not in KINDS:
        yield f"{key} is no kind that is known here"
        return
    shape = {"apiVersion!": str, "kind!": str, "metadata!": META, "spec!": KINDS[key]}
    yield from faults(shape, found, str(key[1]))
