"""The bill of materials of a wheel, as CycloneDX JSON: ``python -m tests.sbom WHEEL`` writes ``WHEEL.cdx.json`` beside it.

It is made from the wheel alone: what it must have installed, what its extras add, and each shared library that it contains,
with its hash. The same wheel always gives the same text.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
SPACE = uuid.UUID("8a4e1c6f-6d0c-5a52-9f35-1f1b3a7f0f6e")
"""The namespace of serial numbers."""
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*(?P<versions>[^;]*?)\s*(?:;\s*(?P<marker>.*))?"
)


def purl(name: str, version: str = "") -> str:
    """Return the package URL of a package of PyPI."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    return f"pkg:pypi/{normal}{'@' * bool(version)}{version}"


def bill_of(wheel: Path) -> dict[str, Any]:
    """Return the bill of materials of a wheel. Raises ValueError if it has no metadata."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(found) != 1:
            raise ValueError(f"{wheel.name} has {len(found)} files of metadata: a wheel has one")
        metadata = HeaderParser().parsestr(archive.read(found[0]).decode())
        libraries = [_library(name, archive.read(name)) for name in sorted(names) if re.search(r"\.so(\.|$)", name)]
    required = _requirements(metadata.get_all("Requires-Dist") or [], metadata["Name"])
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = purl(metadata["Name"], metadata["Version"])
    component = {
        "type": "library",
        "bom-ref": own,
        "name": metadata["Name"],
        "version": metadata["Version"],
        "description": metadata["Summary"],
        "licenses": [{"expression": metadata["License-Expression"]}],
        "purl": own,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(SPACE, digest)}",
        "version": 1,
        "metadata": {"component": component},
        "components": [*required, *libraries],
        "dependencies": [
            {"ref": own, "dependsOn": [each["bom-ref"] for each in required if each["scope"] == "required"]},
            *({"ref": each["bom-ref"]} for each in [*required, *libraries]),
        ],
    }


def _requirements(lines: list[str], own: str) -> list[dict[str, Any]]:
    """Return a component for each package that the wheel requires, or one of its extras does."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        parts = REQUIREMENT.fullmatch(line)
        if parts is None:
            raise ValueError(f"a requirement cannot be read: {line!r}")
        ref = purl(parts["name"])
        if ref == purl(own):
            continue
        extras = re.findall(r"extra == ['\"]([^'\"]+)['\"]", parts["marker"] or "")
        empty: dict[str, Any] = {
            "type": "library",
            "bom-ref": ref,
            "name": parts["name"],
            "scope": "optional",
            "purl": ref,
            "properties": [],
        }
        each = found.setdefault(ref, empty)
        if not extras:
            each["scope"] = "required"
        for name in extras or [""]:
            where = f"aiodatadist:extra:{name}" if name else "aiodatadist:versions"
            each["properties"].append({"name": where, "value": parts["versions"] or "any"})
    return [found[ref] for ref in sorted(found)]


def _library(name: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def written(wheel: Path) -> Path:
    """Write the bill of a wheel beside it; return the file."""
    file = wheel.with_name(f"{wheel.name}.cdx.json")
    file.write_text(json.dumps(bill_of(wheel), indent=1) + "\n", encoding="utf-8")
    return file


def main() -> None:
    for wheel in sys.argv[1:]:
        print(written(Path(wheel)))


if __name__ == "__main__":
    main()
