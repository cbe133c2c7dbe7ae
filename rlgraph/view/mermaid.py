"""A plan as a mermaid flowchart, which GitHub and many editors draw as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlgraph.plan import Plan, Step
from rlgraph.view.links import Link, links, phases, pool_title, title, typed, weights

LOOKS = (
    "classDef run fill:#dbe9ff,stroke:#2f5fb3,color:#10213f",
    "classDef inserted fill:#f3f3f3,stroke:#888888,color:#333333,stroke-dasharray:4 3",
    "classDef weights fill:#fdeccb,stroke:#b07a16,color:#4a3304",
)
POOL = "fill:#f7f9fc,stroke:#9aa5b5,color:#3d4754"
FLOWS = "stroke:#b07a16,stroke-width:1.5px"
PLAIN = re.compile(r"[^\w .,:/@*+=()\[\]-]", re.ASCII)


def mermaid(plan: Plan) -> str:
    """The text of a flowchart: steps by pool, edges with columns and types, versions of models.

    An evaluation is drawn beside training. All that comes from the graph is escaped.
    """
    lines = [*_lines(plan)]
    # no label holds an arrow: > is escaped
    edges = [line for line in lines if re.search("-->|-\\.->|==>", line)]
    flows = ",".join(str(number) for number, line in enumerate(edges) if "==>" in line)
    looks = [*LOOKS, *([f"linkStyle {flows} {FLOWS}"] if flows else [])]
    return "\n".join(["flowchart TD", *(f"  {line}" for line in (*lines, *looks))]) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    for phase, steps in phases(plan).items():
        for number, pool in enumerate(plan.pools):
            mine = [step for step in steps if step.pool == pool]
            if mine:
                named = pool_title(plan, pool) + (", in evaluation" if phase == "eval" else "")
                yield f"subgraph {phase}_pool{number}[{_quoted([named])}]"
                yield from (f"  {_node(step)}" for step in mine)
                yield "end"
                yield f"style {phase}_pool{number} {POOL}"
        for link in links(steps):
            yield _edge(plan, phase, link)
        yield from _weights(phase, steps)


def _id(phase: str, number: int) -> str:
    return f"{phase}_{number}"


def _node(step: Step) -> str:
    name = _id(step.phase, step.id)
    if step.inserted:
        return f"{name}([{_quoted([title(step)])}]):::inserted"
    return f"{name}[{_quoted([step.node, step.op])}]:::run"


def _edge(plan: Plan, phase: str, link: Link) -> str:
    source, target = _id(phase, link.source), _id(phase, link.target)
    if not link.columns:
        return f"{source} -.-> {target}"
    return f"{source} -->|{_quoted(typed(link.columns, plan.columns[phase]))}| {target}"


def _weights(phase: str, steps: Sequence[Step]) -> Iterator[str]:
    for number, found in enumerate(weights(steps)):
        name = f"{phase}_weights{number}"
        yield f"{name}[({_quoted([found.name])})]:::weights"
        if found.writer:
            yield f"{_id(phase, found.writer)} ==> {name}"
        yield from (f"{name} ==> {_id(phase, reader)}" for reader in found.readers)


def _quoted(lines: Sequence[str]) -> str:
    """A label of some lines; every character that could mean something stands as its number."""
    return '"' + "<br/>".join(PLAIN.sub(lambda m: f"#{ord(m[0])};", line) for line in lines) + '"'
