"""Turns a plan into boxes and arrows, which mermaid and graphviz draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlgraph.ir.plan import Plan, Step
from rlgraph.view.drawings.links import links, weights


@dataclass(frozen=True)
class StepGroup:
    """The steps of a pool, or of a region; those of regions within a pool apart."""

    id: str
    title: str
    steps: Sequence[Step]
    regions: Sequence[StepGroup] = ()


@dataclass(frozen=True)
class VersionBox:
    """A version of a model."""

    id: str
    title: str


@dataclass(frozen=True)
class Edge:
    """An arrow between boxes, by their ids. ``kind``: columns, order (it carries nothing) or weights."""

    source: str
    target: str
    kind: str
    lines: Sequence[str] = ()


def drawing(plan: Plan) -> Iterator[StepGroup | VersionBox | Edge]:
    """Yield the parts of a picture in the order in which they are written; an evaluation behind training."""
    for phase, steps in plan.phases.items():
        for number, pool in enumerate(plan.pools):
            mine, count = [step for step in steps if step.pool == pool], plan.pools[pool]
            if mine:
                named = f"pool {pool}: {count} device{'s' * (count != 1)}"
                named += ", in evaluation" if phase == "eval" else ""
                yield _group(f"{phase}_pool{number}", named, mine, steps)
        for link in links(plan, phase):
            ends = box(phase, link.source), box(phase, link.target)
            lines = [f"{name}: {plan.columns[phase][name].type}" for name in link.columns]
            yield Edge(*ends, "columns" if lines else "order", lines)
        yield from _versions(phase, steps)


def _group(name: str, named: str, mine: Sequence[Step], steps: Sequence[Step]) -> StepGroup:
    """Return the steps of a pool; a region is drawn where all of it is on one pool."""
    found = dict.fromkeys(step.region for step in mine if step.region)
    inside = [region for region in found if all(step in mine for step in steps if step.region == region)]
    regions = [
        StepGroup(
            f"{name}_region{n}",
            f"repeated until {region} has let enough rows through",
            [step for step in mine if step.region == region],
        )
        for n, region in enumerate(inside)
    ]
    return StepGroup(name, named, [step for step in mine if step.region not in inside], regions)


def box(phase: str, number: int) -> str:
    """Return the id of a step's box."""
    return f"{phase}_{number}"


def _versions(phase: str, steps: Sequence[Step]) -> Iterator[VersionBox | Edge]:
    for number, found in enumerate(weights(steps)):
        version = VersionBox(f"{phase}_weights{number}", found.name)
        yield version
        if found.writer:
            yield Edge(box(phase, found.writer), version.id, "weights")
        yield from (Edge(version.id, box(phase, reader), "weights") for reader in found.readers)
