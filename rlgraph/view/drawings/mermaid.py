"""Draws a plan as a mermaid flowchart, which GitHub and many editors render."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlgraph.ir.plan import Plan, Step
from rlgraph.view.drawings.boxes import Edge, StepGroup, VersionBox, box, drawing, said
from rlgraph.view.drawings.drawing_options import SHOWN, DrawingOptions

LOOKS = (
    "classDef run fill:#dbe9ff,stroke:#2f5fb3,color:#10213f",
    "classDef inserted fill:#f3f3f3,stroke:#888888,color:#333333,stroke-dasharray:4 3",
    "classDef weights fill:#fdeccb,stroke:#b07a16,color:#4a3304",
)
POOL = "fill:#f7f9fc,stroke:#9aa5b5,color:#3d4754"
RANKS = {"down": "flowchart TD", "right": "flowchart LR"}
FLOWS = "stroke:#b07a16,stroke-width:1.5px"
ARROWS = {"columns": "-->", "order": "-.->", "weights": "==>"}
PLAIN = re.compile(r"[^\w .,:/@*+=()\[\]-]", re.ASCII)


def mermaid(plan: Plan, options: DrawingOptions = SHOWN) -> str:
    """Return the text of a flowchart: steps by pool, edges with columns, versions of models.

    An evaluation is drawn beside training. All that comes from the graph is escaped.
    """
    parts = [*drawing(plan, options)]
    lines = [line for part in parts for line in _lines(part)]
    kinds = [part.kind for part in parts if isinstance(part, Edge)]
    flows = ",".join(str(number) for number, kind in enumerate(kinds) if kind == "weights")
    looks = [*LOOKS, *([f"linkStyle {flows} {FLOWS}"] if flows else [])]
    return "\n".join([RANKS[options.direction], *(f"  {line}" for line in (*lines, *looks))]) + "\n"


def _lines(part: StepGroup | VersionBox | Edge) -> Iterator[str]:
    match part:
        case StepGroup():
            yield f"subgraph {part.id}[{_quoted([part.title])}]"
            yield from (f"  {line}" for inner in part.regions for line in _lines(inner))
            yield from (f"  {_node(step)}" for step in part.steps)
            yield "end"
            yield f"style {part.id} {POOL}"
        case VersionBox():
            yield f"{part.id}[({_quoted([part.title])})]:::weights"
        case Edge():
            label = f"|{_quoted(part.lines)}|" if part.lines else ""
            yield f"{part.source} {ARROWS[part.kind]}{label} {part.target}"


def _node(step: Step) -> str:
    name = box(step.phase, step.id)
    if step.inserted:
        return f"{name}([{_quoted(said(step))}]):::inserted"
    return f"{name}[{_quoted(said(step))}]:::run"


def _quoted(lines: Sequence[str]) -> str:
    """Return a label of some lines; every character that could mean something stands as its number."""
    return '"' + "<br/>".join(PLAIN.sub(lambda m: f"#{ord(m[0])};", line) for line in lines) + '"'
