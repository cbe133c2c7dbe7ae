"""Faults of a model's serve section that an engine's preflight finds before a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SectionFault:
    """A problem of a serve section: its kind, where it stands there, what is wrong and what to do."""

    kind: str  # such as ``no-engine``
    key: tuple[str, ...]  # such as ``("options", "ep_size")``
    law: str
    remedy: str = ""  # SERVE in it stands for the section's path
