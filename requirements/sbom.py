"""Write the packages of this environment as a bill of materials: CycloneDX 1.6, JSON (ECMA-424).

python requirements/sbom.py [FILE]           # build/sbom.json unless given
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def component(package: Distribution) -> dict[str, Any]:
    """A package by name, version and package URL, with its license where its metadata name one."""
    name, version = package.metadata["Name"], package.version
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
    one = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    license = package.metadata.get("License-Expression")
    return {**one, "licenses": [{"expression": license}]} if license else one


def bill() -> dict[str, Any]:
    """The whole document."""
    components = {made["purl"]: made for made in map(component, distributions())}
    (own,) = [made for made in components.values() if made["name"] == "rlgraph-compiler"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**own, "type": "application"},
        },
        "components": [made for _, made in sorted(components.items()) if made is not own],
    }


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "sbom.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(bill()['components'])} packages")


if __name__ == "__main__":
    main()
