"""Draws a plan for graphviz, ``rlgraph plan grpo --format dot | dot -Tsvg``, or by it, as SVG or PNG."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.printing.step_text import StepEntry
from rlgraph.view.drawings.boxes import Edge, StepGroup, VersionBox, box, box_lines, drawing
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
NOT_INSTALLED = (
    "pictures are laid out by graphviz, and its program `dot` is not here\n"
    "  install it: apt-get install graphviz, brew install graphviz or conda install graphviz\n"
    "  or write what it reads, and draw that elsewhere: --format dot, or mermaid, which GitHub draws"
)


def dot(plan: Plan, options: DrawingOptions = SHOWN) -> str:
    """Return the text of a digraph: steps by pool, edges with columns, versions of models.

    An evaluation is drawn beside training.
    """
    lines = [*LOOKS, RANKS[options.direction]]
    for element in drawing(plan, options):
        lines += _element_lines(element)
    name = _quoted([plan.graph])
    return "\n".join([f"digraph {name} {{", *_indented(lines), "}"]) + "\n"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _element_lines(element: StepGroup | VersionBox | Edge) -> Iterator[str]:
    match element:
        case StepGroup():
            yield f"subgraph cluster_{element.id} {{"
            yield f"  label={_quoted([element.title])}; {POOL}"
            for region in element.regions:
                yield from _indented(_element_lines(region))
            yield from _indented(_node(entry) for entry in element.steps)
            yield "}"
        case VersionBox():
            yield f"{element.id} [label={_quoted([element.title])}, {WEIGHTS}]"
        case Edge():
            yield f"{element.source} -> {element.target} [{_look(element)}]"


def _node(entry: StepEntry) -> str:
    step = entry.step
    tooltip = f", tooltip={_quoted([step.because])}" if step.because else ""
    look = INSERTED if step.inserted else RUN
    return f"{box(step.phase, step.id)} [label={_quoted(box_lines(entry))}, {look}{tooltip}]"


def _look(edge: Edge) -> str:
    if edge.kind == "columns":
        return f"label={_quoted(edge.lines, align='l')}"
    return FLOWS if edge.kind == "weights" else "style=dotted"


def _quoted(lines: Sequence[str], align: str = "n") -> str:
    """Return a string of some lines: ``align`` is n for centred lines, l for lines aligned to the left."""
    escaped = [_escaped(line) for line in lines]
    if align == "l":
        return '"' + "".join(f"{line}\\l" for line in escaped) + '"'
    return '"' + f"\\{align}".join(escaped) + '"'


def _escaped(line: str) -> str:
    """Return a line in which no character means anything to graphviz."""
    printable = "".join(character if character.isprintable() else " " for character in line)
    # within quotes only \ and " have a meaning, and in labels &name; is an entity
    return printable.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")


def picture(plan: Plan, kind: str, options: DrawingOptions = SHOWN) -> bytes:
    """Return an image file, svg or png, that shows the graph of a plan.

    Raises:
        RunError: it is another kind, or graphviz is not installed, or failed.
    """
    if kind not in KINDS:
        raise RunError(f"a picture is {' or '.join(KINDS)}, and not `{kind}`")
    if not shutil.which("dot"):
        raise RunError(NOT_INSTALLED)
    command = ["dot", f"-T{kind}"]
    if kind == "png":
        command.append("-Gdpi=144")
    result = subprocess.run(command, input=dot(plan, options).encode(), capture_output=True, check=False)
    if result.returncode:
        message = result.stderr.decode(errors="replace").strip()
        raise RunError(f"graphviz could not draw {plan.graph}: {message}")
    return result.stdout
