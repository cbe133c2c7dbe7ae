"""Findings of checks: what holds, what may trouble, and what is wrong, with the remedy.

``rlgraph doctor`` prints them. Before a run (``preflight``) those that are wrong are problems of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        level: ``ok``, ``warn`` or ``wrong``.
        text: what was found.
        remedy: what to do about it; empty where it is ok. SERVE in that of an engine's check stands for the
            path of the serve section.
        kind: what kind of problem it is for a graph, such as ``no-engine``.
        key: where the problem is in the section that was checked, such as ``("options", "ep_size")``.
    """

    level: Literal["ok", "warn", "wrong"]
    text: str
    remedy: str = ""
    kind: str = ""
    key: tuple[str, ...] = ()


Findings = Iterator[Finding]


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, remedy: str = "") -> Finding:
    return Finding("warn", text, remedy)


def wrong(text: str, remedy: str = "", kind: str = "", key: tuple[str, ...] = ()) -> Finding:
    return Finding("wrong", text, remedy, kind, key)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that hold weights."""
    return [file for pattern in WEIGHT_FILES for file in folder.glob(pattern)]


def folder_findings(path: str, *, needs_weights: bool = True) -> Findings:
    """Yield what is wrong with the folder of a model, before any of its files is read; a hub name has none.

    The texts go on behind the path: "is not a model folder".
    """
    folder = Path(path)
    if not folder.exists():
        is_hub_name = path.count("/") == 1
        if not is_hub_name:
            yield wrong("does not exist", kind="no-model")
    elif not (folder / "config.json").is_file():
        yield wrong("is not a model folder: it has no config.json", kind="no-model")
    elif needs_weights and not weight_files(folder):
        yield wrong("has no weights (*.safetensors)", "fetch the whole model", kind="no-model")
