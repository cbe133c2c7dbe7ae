"""Records a run's environment: versions, the command, devices. Shell variables hold secrets: none is kept."""

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlgraph.engines.registry import SERVING
from rlgraph.version import VERSION

# what decides numbers and speed
PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "ray"),
    *("numpy", "pyarrow", "math-verify"),
    *(engine.module for engine in SERVING.values() if engine.module),
)


def environment(devices: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the environment as ``environment.json`` holds it, with those ``before`` of earlier starts."""
    return {
        "rlgraph": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: release for name in PACKAGES if (release := installed_version(name))},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "devices": [*devices],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": [*before],
    }


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, or nothing where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
