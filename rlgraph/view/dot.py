"""A plan as a graph for graphviz: ``rlgraph plan grpo --format dot | dot -Tsvg``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlgraph.plan import Plan, Step
from rlgraph.view.links import Link, links, phases, pool_title, title, typed, weights

FONT = 'fontname="Helvetica,Arial,sans-serif"'
RUN = 'shape=box, style="rounded,filled", fillcolor="#dbe9ff", color="#2f5fb3"'
INSERTED = 'shape=box, style="rounded,filled,dashed", fillcolor="#f3f3f3", color="#888888", fontsize=10'
WEIGHTS = 'shape=cylinder, style=filled, fillcolor="#fdeccb", color="#b07a16", fontsize=11'
FLOWS = 'color="#b07a16", style=dashed, arrowsize=0.7'


def dot(plan: Plan) -> str:
    """The text of a digraph: steps by pool, edges with columns and types, versions of models.

    An evaluation is drawn beside training.
    """
    return "\n".join([f"digraph {_quoted([plan.graph])} {{", *(f"  {x}" for x in _lines(plan)), "}"]) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"graph [{FONT}, rankdir=TB, nodesep=0.3, ranksep=0.35, fontsize=12]"
    yield f"node [{FONT}, fontsize=12, margin=0.12]"
    yield f'edge [{FONT}, fontsize=9, color="#555555", fontcolor="#444444", arrowsize=0.7]'
    for phase, steps in phases(plan).items():
        for number, pool in enumerate(plan.pools):
            mine = [step for step in steps if step.pool == pool]
            if mine:
                named = pool_title(plan, pool) + (", in evaluation" if phase == "eval" else "")
                yield f"subgraph cluster_{phase}_{number} {{"
                yield f'  label={_quoted([named])}; style=rounded; color="#9aa5b5"; fontcolor="#556070"'
                yield from (f"  {_node(step)}" for step in mine)
                yield "}"
        yield from (_edge(plan, phase, link) for link in links(steps))
        yield from _weights(phase, steps)


def _id(phase: str, number: int) -> str:
    return f"{phase}_{number}"


def _node(step: Step) -> str:
    label = [title(step)] if step.inserted else [step.node, step.op]
    said = f", tooltip={_quoted([step.because])}" if step.because else ""
    look = INSERTED if step.inserted else RUN
    return f"{_id(step.phase, step.id)} [label={_quoted(label)}, {look}{said}]"


def _edge(plan: Plan, phase: str, link: Link) -> str:
    ends = f"{_id(phase, link.source)} -> {_id(phase, link.target)}"
    if not link.columns:
        return f"{ends} [style=dotted]"
    # left-aligned lines: each ends in \l
    return f"{ends} [label={_quoted(typed(link.columns, plan.columns[phase]), end='l')}]"


def _weights(phase: str, steps: Sequence[Step]) -> Iterator[str]:
    for number, found in enumerate(weights(steps)):
        name = f"{phase}_weights{number}"
        yield f"{name} [label={_quoted([found.name])}, {WEIGHTS}]"
        if found.writer:
            yield f"{_id(phase, found.writer)} -> {name} [{FLOWS}]"
        yield from (f"{name} -> {_id(phase, reader)} [{FLOWS}]" for reader in found.readers)


def _quoted(lines: Sequence[str], end: str = "n") -> str:
    """A string of some lines. Within quotes, only these characters mean something to graphviz."""
    escaped = [_escaped(line) for line in lines]
    text = "".join(f"{line}\\l" for line in escaped) if end == "l" else f"\\{end}".join(escaped)
    return f'"{text}"'


def _escaped(line: str) -> str:
    flat = "".join(c if c.isprintable() else " " for c in line)
    # &name; is an entity to graphviz, in labels
    return flat.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
