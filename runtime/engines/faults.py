"""Faults of a model's serve section that an engine's preflight finds before a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A problem of a serve section.

    Attributes:
        kind: of the problem, as ``no-engine``.
        key: where it stands in the section, as ``("options", "ep_size")``.
        law: what is wrong.
        remedy: what to do; SERVE in it stands for the section's path.
    """

    kind: str
    key: tuple[str, ...]
    law: str
    remedy: str = ""
