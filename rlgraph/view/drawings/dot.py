"""Draws a plan for graphviz, ``rlgraph plan grpo --format dot | dot -Tsvg``, or by it, as SVG or PNG."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.view.drawings.boxes import Edge, StepGroup, VersionBox, box, drawing, said
from rlgraph.view.drawings.drawing_options import SHOWN, DrawingOptions

FONT = 'fontname="Helvetica,Arial,sans-serif"'
RUN = 'shape=box, style="rounded,filled", fillcolor="#dbe9ff", color="#2f5fb3"'
INSERTED = 'shape=box, style="rounded,filled,dashed", fillcolor="#f3f3f3", color="#888888", fontsize=10'
WEIGHTS = 'shape=cylinder, style=filled, fillcolor="#fdeccb", color="#b07a16", fontsize=11'
POOL = 'style=rounded; labeljust=l; color="#9aa5b5"; fontcolor="#556070"'
FLOWS = 'color="#b07a16", style=dashed, arrowsize=0.7'
LOOKS = (
    f"graph [{FONT}, nodesep=0.3, ranksep=0.35, fontsize=12]",
    f"node [{FONT}, fontsize=12, margin=0.12]",
    f'edge [{FONT}, fontsize=9, color="#555555", fontcolor="#444444", arrowsize=0.7]',
)
KINDS = ("svg", "png")
RANKS = {"down": "rankdir=TB", "right": "rankdir=LR"}
MISSING = (
    "pictures are laid out by graphviz, and its program `dot` is not here\n"
    "  install it: apt-get install graphviz, brew install graphviz or conda install graphviz\n"
    "  or write what it reads, and draw that elsewhere: --format dot, or mermaid, which GitHub draws"
)


def dot(plan: Plan, options: DrawingOptions = SHOWN) -> str:
    """Return the text of a digraph: steps by pool, edges with columns, versions of models.

    An evaluation is drawn beside training.
    """
    parts = drawing(plan, options)
    lines = [
        *LOOKS,
        RANKS[options.direction],
        *(line for part in parts for line in _lines(part)),
    ]
    return "\n".join([f"digraph {_quoted([plan.graph])} {{", *(f"  {line}" for line in lines), "}"]) + "\n"


def _lines(part: StepGroup | VersionBox | Edge) -> Iterator[str]:
    match part:
        case StepGroup():
            yield f"subgraph cluster_{part.id} {{"
            yield f"  label={_quoted([part.title])}; {POOL}"
            yield from (f"  {line}" for inner in part.regions for line in _lines(inner))
            yield from (f"  {_node(step)}" for step in part.steps)
            yield "}"
        case VersionBox():
            yield f"{part.id} [label={_quoted([part.title])}, {WEIGHTS}]"
        case Edge():
            yield f"{part.source} -> {part.target} [{_look(part)}]"


def _node(step: Step) -> str:
    because = f", tooltip={_quoted([step.because])}" if step.because else ""
    look = INSERTED if step.inserted else RUN
    return f"{box(step.phase, step.id)} [label={_quoted(said(step))}, {look}{because}]"


def _look(edge: Edge) -> str:
    if edge.kind == "columns":
        return f"label={_quoted(edge.lines, end='l')}"  # left-aligned lines: each ends in \l
    return FLOWS if edge.kind == "weights" else "style=dotted"


def _quoted(lines: Sequence[str], end: str = "n") -> str:
    """Return a string of some lines. Within quotes, only these characters mean something to graphviz."""
    flat = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    # &name; is an entity to graphviz, in labels
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in flat]
    text = "".join(f"{line}\\l" for line in escaped) if end == "l" else f"\\{end}".join(escaped)
    return f'"{text}"'


def picture(plan: Plan, kind: str, options: DrawingOptions = SHOWN) -> bytes:
    """Return an image file, svg or png, that shows the graph of a plan.

    Raises:
        RunError: it is another kind, or graphviz is not here, or failed.
    """
    if kind not in KINDS:
        raise RunError(f"a picture is {' or '.join(KINDS)}, and not `{kind}`")
    if not shutil.which("dot"):
        raise RunError(MISSING)
    command = ["dot", f"-T{kind}", *(["-Gdpi=144"] if kind == "png" else [])]
    ran = subprocess.run(command, input=dot(plan, options).encode(), capture_output=True, check=False)
    if ran.returncode:
        raise RunError(f"graphviz could not draw {plan.graph}: {ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout
