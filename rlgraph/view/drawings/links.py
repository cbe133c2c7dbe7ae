"""Links between steps: columns, and versions of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import Version


@dataclass(frozen=True)
class Link:
    """The columns that one step reads of another, by their numbers; none where it only has to come first."""

    source: int
    target: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class WeightsBox:
    """A version of a model: the step that makes it, if one of this iteration does, and those that read it."""

    model: str
    version: Version
    writer: int | None
    readers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The version's name, as ``policy@v+1``."""
        return f"{self.model}@{self.version}"


def links(plan: Plan, phase: str) -> list[Link]:
    """Return the dependency edges between the steps of a phase, transitively reduced."""
    needs = plan.needs[phase]
    kept = nx.transitive_reduction(needs).edges
    found = [
        Link(source, step, tuple(columns))
        for step, source, columns in needs.edges(data="columns")
        if columns or (step, source) in kept
    ]
    return sorted(found, key=lambda link: (link.target, link.source))


def weights(steps: Sequence[Step]) -> list[WeightsBox]:
    """Return the versions of models that a phase reads and writes, model by model, oldest first.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [found.name for found in weights(compile_graph("grpo", devices=1).steps)]
        ['policy@v', 'policy@v+1', 'ref@v']
    """
    readers: dict[tuple[str, Version], list[int]] = {}
    writers: dict[tuple[str, Version], int] = {}
    for step in steps:
        for model, version in step.models.items():
            if version:
                readers.setdefault((model, version), []).append(step.id)
                writers |= {(model, version.next): step.id} if step.updated == model else {}
    order = list(dict.fromkeys(model for model, _ in (*readers, *writers)))
    keys = sorted({*readers, *writers}, key=lambda key: (order.index(key[0]), key[1].offset))
    return [WeightsBox(*key, writers.get(key), tuple(readers.get(key, ()))) for key in keys]


def title(step: Step) -> str:
    """Return a step in a few words: the user's name of it, or the kind of an inserted one."""
    if not step.inserted:
        return step.node
    what = " and ".join(step.parts) + " of " if step.parts else ""
    about = ", ".join(step.reads) or ", ".join(step.models)
    return f"{step.facts.verb} {what}{about}"
