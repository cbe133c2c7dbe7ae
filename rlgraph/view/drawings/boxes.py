"""Turns a plan into boxes and arrows, which mermaid and graphviz draw: steps, and what links them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.ir.steps import Version
from rlgraph.view.drawings.drawing_options import DrawingOptions


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
        """Return the version's name, as ``policy@v+1``."""
        return f"{self.model}@{self.version}"


def links(plan: Plan, phase: str, inserted: bool = True) -> list[Link]:
    """Return the dependency edges between the steps of a phase, transitively reduced.

    Without the inserted steps, the user's are linked by what goes from one to the other through copies.
    """
    import networkx as nx  # here, as printing a plan needs other parts of this module alone

    steps, edges = plan.phases[phase], [*plan.needs[phase].edges()]
    needs = nx.DiGraph((a, b) for a, b, _ in edges)
    needs.add_nodes_from(step.id for step in steps)
    carried = {(b, a): columns for a, b, columns in edges if columns}
    if not inserted:
        by_name = {step.node: step for step in steps}
        written = [step for step in steps if not step.inserted]
        read = {step.id: sources(step, by_name, plan.columns[phase]) for step in written}
        carried = {(by_name[node].id, b): tuple(names) for b, a in read.items() for node, names in a.items()}
        for hidden in (step.id for step in steps if step.inserted):
            needs.add_edges_from([*product(needs.predecessors(hidden), needs.successors(hidden))])
            needs.remove_node(hidden)
    ends = {*carried, *((b, a) for a, b in nx.transitive_reduction(needs).edges)}
    return [Link(*pair, carried.get(pair, ())) for pair in sorted(ends, key=lambda pair: pair[::-1])]


def sources(
    step: Step, by_name: Mapping[str, Step], columns: Mapping[str, ColumnPlan]
) -> dict[str, list[str]]:
    """Return node -> the columns that a step has of it, through what was inserted between."""
    found: dict[str, list[str]] = {}
    for origin in (columns[name].origin for name in step.reads):
        writer = by_name[columns[origin].writer]
        read = sources(writer, by_name, columns) if writer.inserted else {writer.node: [origin]}
        for node, names in read.items():
            found[node] = [*dict.fromkeys((*found.get(node, ()), *names))]
    return found


def weights(steps: Sequence[Step]) -> list[WeightsBox]:
    """Return the versions of models that a phase reads and writes, model by model, oldest first.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [version.name for version in weights(compile_graph("grpo", devices=1).steps)]
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


def drawing(plan: Plan, options: DrawingOptions) -> Iterator[StepGroup | VersionBox | Edge]:
    """Yield the parts of a picture in the order in which they are written; an evaluation behind training."""
    for phase, every in plan.phases.items():
        steps = [step for step in every if options.inserted or not step.inserted]
        shown = {step.id for step in steps}
        for number, pool in enumerate(plan.pools):
            mine, count = [step for step in steps if step.pool == pool], plan.pools[pool]
            if mine:
                named = f"pool {pool}: {count} device{'s' * (count != 1)}"
                named += ", in evaluation" if phase == "eval" else ""
                yield _group(f"{phase}_pool{number}", named, mine, steps)
        for link in links(plan, phase, options.inserted):
            ends = box(phase, link.source), box(phase, link.target)
            lines = [_column(plan, phase, name, options) for name in link.columns]
            yield Edge(*ends, "columns" if lines else "order", lines)
        for number, held in enumerate(weights(every)):
            version = VersionBox(f"{phase}_weights{number}", held.name)
            yield version
            if held.writer:
                yield Edge(box(phase, held.writer), version.id, "weights")
            readers = (reader for reader in held.readers if reader in shown)
            yield from (Edge(version.id, box(phase, reader), "weights") for reader in readers)


def _column(plan: Plan, phase: str, name: str, options: DrawingOptions) -> str:
    return f"{name}: {plan.columns[phase][name].type}" if options.types else name


def said(step: Step) -> list[str]:
    """Return the lines in a step's box: its title and its op, where that is not the same."""
    return [title(step)] if step.inserted or step.op == step.node else [step.node, step.op]


def _group(name: str, named: str, mine: Sequence[Step], steps: Sequence[Step]) -> StepGroup:
    """Return the steps of a pool; a region is drawn where all of it is on one pool."""
    names = dict.fromkeys(step.region for step in mine if step.region)
    inside = [region for region in names if all(step in mine for step in steps if step.region == region)]
    regions = []
    for number, region in enumerate(inside):
        within = [step for step in mine if step.region == region]
        until = f"repeated until {region} has let enough rows through"
        regions.append(StepGroup(f"{name}_region{number}", until, within))
    return StepGroup(name, named, [step for step in mine if step.region not in inside], regions)


def box(phase: str, number: int) -> str:
    """Return the id of a step's box."""
    return f"{phase}_{number}"
