"""The lines that a check prints: what holds, what may trouble, and what is wrong with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

GUIDE = "docs/gpu.md"  # remedies point to its sections


@dataclass(frozen=True)
class Finding:
    """One finding of a check, and the remedy where it is not ok."""

    level: Literal["ok", "warn", "wrong"]
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, remedy: str) -> Finding:
    return Finding("warn", text, remedy)


def wrong(text: str, remedy: str) -> Finding:
    return Finding("wrong", text, remedy)
