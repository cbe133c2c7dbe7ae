"""The lines that a check prints: what holds, what may trouble, and what is wrong with its remedy."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

GUIDE = "docs/gpu.md"  # remedies point to its sections


@dataclass(frozen=True)
class Finding:
    """One finding of a check, and the remedy where it is not ok."""

    level: Literal["ok", "warn", "wrong"]
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


ok, warn, wrong = (partial(Finding, level) for level in ("ok", "warn", "wrong"))
