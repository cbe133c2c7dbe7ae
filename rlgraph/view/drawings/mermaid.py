"""Draws a plan as a mermaid flowchart, which GitHub and many editors render."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rlgraph.ir.plan import Plan
from rlgraph.printing.step_text import StepEntry
from rlgraph.view.drawings.boxes import Edge, StepGroup, VersionBox, box, box_lines, drawing
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
    lines: list[str] = []
    weight_edges: list[str] = []  # numbers of the edges that carry weights, which linkStyle asks for
    edge_count = 0
    for element in drawing(plan, options):
        lines += _element_lines(element)
        if isinstance(element, Edge):
            if element.kind == "weights":
                weight_edges.append(str(edge_count))
            edge_count += 1
    lines += LOOKS
    if weight_edges:
        lines.append(f"linkStyle {','.join(weight_edges)} {FLOWS}")
    return "\n".join([RANKS[options.direction], *_indented(lines)]) + "\n"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _element_lines(element: StepGroup | VersionBox | Edge) -> Iterator[str]:
    match element:
        case StepGroup():
            yield f"subgraph {element.id}[{_quoted([element.title])}]"
            for region in element.regions:
                yield from _indented(_element_lines(region))
            yield from _indented(_node(entry) for entry in element.steps)
            yield "end"
            yield f"style {element.id} {POOL}"
        case VersionBox():
            yield f"{element.id}[({_quoted([element.title])})]:::weights"
        case Edge():
            label = f"|{_quoted(element.lines)}|" if element.lines else ""
            yield f"{element.source} {ARROWS[element.kind]}{label} {element.target}"


def _node(entry: StepEntry) -> str:
    name = box(entry.step.phase, entry.step.id)
    label = _quoted(box_lines(entry))
    if entry.step.inserted:
        return f"{name}([{label}]):::inserted"
    return f"{name}[{label}]:::run"


def _quoted(lines: Sequence[str]) -> str:
    """Return a label of some lines, in which every character that has a meaning is given as its number."""
    escaped = [PLAIN.sub(lambda match: f"#{ord(match[0])};", line) for line in lines]
    return '"' + "<br/>".join(escaped) + '"'
