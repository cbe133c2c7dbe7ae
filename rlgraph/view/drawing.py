"""A plan as boxes and arrows, for what draws pictures: mermaid and graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlgraph.plan import Plan, Step
from rlgraph.view.links import links, phases, pool_title, region_title, typed, weights


@dataclass(frozen=True)
class Group:
    """The steps of a pool, or of a region; those of regions within a pool apart."""

    id: str
    title: str
    steps: Sequence[Step]
    regions: Sequence[Group] = ()


@dataclass(frozen=True)
class Version:
    """A version of a model."""

    id: str
    title: str


@dataclass(frozen=True)
class Edge:
    """From box to box, by their ids. ``kind``: columns, order (nothing goes along) or weights."""

    source: str
    target: str
    kind: str
    lines: Sequence[str] = ()


def drawing(plan: Plan) -> Iterator[Group | Version | Edge]:
    """The parts of a picture, in the order in which they are written; an evaluation behind training."""
    for phase, steps in phases(plan).items():
        for number, pool in enumerate(plan.pools):
            mine = [step for step in steps if step.pool == pool]
            if mine:
                named = pool_title(plan, pool) + (", in evaluation" if phase == "eval" else "")
                yield _group(f"{phase}_pool{number}", named, mine, steps)
        for link in links(steps):
            ends = _id(phase, link.source), _id(phase, link.target)
            lines = typed(link.columns, plan.columns[phase])
            yield Edge(*ends, "columns" if lines else "order", lines)
        yield from _versions(phase, steps)


def _group(name: str, named: str, mine: Sequence[Step], steps: Sequence[Step]) -> Group:
    """The steps of a pool; a region is drawn where all of it is on one pool."""
    found = dict.fromkeys(step.region for step in mine if step.region)
    inside = [region for region in found if all(step in mine for step in steps if step.region == region)]
    regions = [
        Group(f"{name}_region{n}", region_title(region), [step for step in mine if step.region == region])
        for n, region in enumerate(inside)
    ]
    return Group(name, named, [step for step in mine if step.region not in inside], regions)


def box(step: Step) -> str:
    """The id of a step."""
    return _id(step.phase, step.id)


def _id(phase: str, number: int) -> str:
    return f"{phase}_{number}"


def _versions(phase: str, steps: Sequence[Step]) -> Iterator[Version | Edge]:
    for number, found in enumerate(weights(steps)):
        version = Version(f"{phase}_weights{number}", found.name)
        yield version
        if found.writer:
            yield Edge(_id(phase, found.writer), version.id, "weights")
        yield from (Edge(version.id, _id(phase, reader), "weights") for reader in found.readers)
