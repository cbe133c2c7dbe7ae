"""What a run starts with: versions, the command, devices. No variables of the shell: they hold secrets."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlgraph import __version__

# what decides numbers and speed
PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "sglang", "ray"),
    *("numpy", "pyarrow", "math-verify"),
)


def environment(devices: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As ``environment.json`` holds it.

    Args:
        devices: what each worker is on.
        before: the same of earlier starts of this run, the oldest first.
    """
    return {
        "rlgraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "devices": [*devices],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": [*before],
    }


def installed_version(package: str) -> str | None:
    """That of a distribution, or nothing where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
