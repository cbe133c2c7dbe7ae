"""A plan as boxes and arrows, which mermaid and graphviz draw: its steps, and what links them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.ir.steps import Version
from rlgraph.printing.document import PlanDocument
from rlgraph.printing.step_text import StepEntry
from rlgraph.units import plural
from rlgraph.view.drawings.drawing_options import DrawingOptions

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Link:
    """The columns that one step reads from another, by their numbers; none if it only has to wait for it."""

    source: int
    target: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class WeightsBox:
    """A version of a model, the step of this iteration that writes it, if any, and the steps that read it."""

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

    Without the inserted steps, the user's steps are linked by the columns that reach them through copies.
    """
    import networkx as nx  # here, as printing a plan needs other parts of this module alone

    edges = [*plan.needs[phase].edges()]
    needs = nx.DiGraph((reader, writer) for reader, writer, _ in edges)
    needs.add_nodes_from(step.id for step in plan.phases[phase])
    if inserted:
        columns = {(writer, reader): names for reader, writer, names in edges if names}
    else:
        columns = _columns_through_copies(plan, phase)
        hidden = [step.id for step in plan.phases[phase] if step.inserted]
        for number in hidden:
            _bypass(needs, number)
    pairs = {*columns}
    for reader, writer in nx.transitive_reduction(needs).edges:
        pairs.add((writer, reader))
    in_order = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return [Link(source, target, columns.get((source, target), ())) for source, target in in_order]


def _columns_through_copies(plan: Plan, phase: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return (writer, reader) -> columns, for the steps that the user wrote."""
    steps = {step.node: step for step in plan.phases[phase]}
    columns: dict[tuple[int, int], tuple[str, ...]] = {}
    for step in steps.values():
        if step.inserted:
            continue
        for node, names in sources(step, steps, plan.columns[phase]).items():
            columns[steps[node].id, step.id] = tuple(names)
    return columns


def _bypass(graph: nx.DiGraph[int], number: int) -> None:
    """Remove a step from a graph, and link all that precede it with all that follow it."""
    around = [*product(graph.predecessors(number), graph.successors(number))]
    graph.add_edges_from(around)
    graph.remove_node(number)


def sources(step: Step, steps: Mapping[str, Step], columns: Mapping[str, ColumnPlan]) -> dict[str, list[str]]:
    """Return node -> the columns that a step reads from it, followed through inserted copies."""
    names_of: dict[str, list[str]] = {}
    for name in step.reads:
        origin = columns[name].origin
        writer = steps[columns[origin].writer]
        reads = {writer.node: [origin]}
        if writer.inserted:
            reads = sources(writer, steps, columns)
        for node, names in reads.items():
            names_of[node] = [*dict.fromkeys((*names_of.get(node, ()), *names))]
    return names_of


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
            if version is None:
                continue
            readers.setdefault((model, version), []).append(step.id)
            if step.updated == model:
                writers[model, version.next] = step.id
    # models in the order in which steps read them
    model_order = {model: None for model, _ in (*readers, *writers)}
    boxes = []
    for model in model_order:
        versions = {version for name, version in (*readers, *writers) if name == model}
        for version in sorted(versions, key=lambda version: version.offset):
            key = (model, version)
            boxes.append(WeightsBox(model, version, writers.get(key), tuple(readers.get(key, ()))))
    return boxes


@dataclass(frozen=True)
class StepGroup:
    """The steps of a pool, or of a region; a region within a pool is a group inside the pool's."""

    id: str
    title: str
    steps: Sequence[StepEntry]
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
    """Yield the elements of a picture in the order in which they are written, training first."""
    document = PlanDocument(plan)
    for phase, entries in document.steps.items():
        visible = [entry for entry in entries if options.inserted or not entry.step.inserted]
        yield from _pools(plan, phase, visible)
        yield from _column_edges(plan, phase, options)
        yield from _versions(plan, phase, visible)


def _pools(plan: Plan, phase: str, entries: Sequence[StepEntry]) -> Iterator[StepGroup]:
    for number, (pool, count) in enumerate(plan.pools.items()):
        in_pool = [entry for entry in entries if entry.step.pool == pool]
        if not in_pool:
            continue
        title = f"pool {pool}: {count} {plural('device', count)}"
        if phase == "eval":
            title += ", in evaluation"
        yield _pool_group(f"{phase}_pool{number}", title, in_pool, entries)


def _pool_group(
    name: str, title: str, in_pool: Sequence[StepEntry], entries: Sequence[StepEntry]
) -> StepGroup:
    """Return the steps of a pool; a region gets its frame if all of its steps are on this pool."""
    outside = {entry.step.region for entry in entries if entry not in in_pool}
    region_names = dict.fromkeys(entry.step.region for entry in in_pool if entry.step.region)
    framed = [region for region in region_names if region not in outside]
    regions = []
    for number, region in enumerate(framed):
        in_region = [entry for entry in in_pool if entry.step.region == region]
        condition = f"repeated until {region} has let enough rows through"
        regions.append(StepGroup(f"{name}_region{number}", condition, in_region))
    unframed = [entry for entry in in_pool if entry.step.region not in framed]
    return StepGroup(name, title, unframed, regions)


def _column_edges(plan: Plan, phase: str, options: DrawingOptions) -> Iterator[Edge]:
    columns = plan.columns[phase]
    for link in links(plan, phase, options.inserted):
        lines = [*link.columns]
        if options.types:
            lines = [f"{name}: {columns[name].type}" for name in link.columns]
        kind = "columns" if lines else "order"
        yield Edge(box(phase, link.source), box(phase, link.target), kind, lines)


def _versions(plan: Plan, phase: str, entries: Sequence[StepEntry]) -> Iterator[VersionBox | Edge]:
    """Yield the versions of models with the arrows from their writers and to their readers."""
    numbers = {entry.step.id for entry in entries}
    for index, version in enumerate(weights(plan.phases[phase])):
        version_box = VersionBox(f"{phase}_weights{index}", version.name)
        yield version_box
        if version.writer:
            yield Edge(box(phase, version.writer), version_box.id, "weights")
        for reader in version.readers:
            if reader in numbers:
                yield Edge(version_box.id, box(phase, reader), "weights")


def box_lines(entry: StepEntry) -> list[str]:
    """Return the lines in a step's box: its title, and its op if that has another name."""
    step = entry.step
    if step.inserted or step.op == step.node:
        return [entry.title]
    return [entry.title, step.op]


def box(phase: str, number: int) -> str:
    """Return the id of a step's box."""
    return f"{phase}_{number}"
