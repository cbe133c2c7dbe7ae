"""Shows a plan in a terminal: colours by pool, memory as bars, the schedule as lanes, nodes as a tree."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from rlgraph.errors import fitted, visible
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.planning.simulate import occupied
from rlgraph.printing.document import DocumentLine, LineKind, PlanDocument
from rlgraph.printing.plan_text import INDENT, line_text
from rlgraph.units import size_text
from rlgraph.view.drawings.boxes import sources
from rlgraph.view.timeline import ahead, expected

COLOURS = ("blue", "magenta", "green", "yellow", "cyan", "red")
SPACES = re.compile(r"( +)")
DATA = ("reads", "writes", "frees", "takes")  # details whose label is dimmed and whose text is plain
WIDTH = 100  # characters per line unless the terminal says another number
LABEL = 16  # characters before a lane or a bar
PEAK = 24  # characters behind a bar, for its bytes
TITLES = {"train": "in every iteration", "eval": "in evaluation"}


def terminal_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as text, in colours, with lanes and bars, for a terminal of so many columns."""
    document = PlanDocument(plan)
    lines: list[str] = []
    for line in document.lines:
        lines += _styled(document, line, width)
    lines += ["", *_lanes(document, width), *_memory_bars(plan, width)]
    lines += ["", _closing(document, width)]
    return "\n".join(lines) + "\n"


def _styled(document: PlanDocument, line: DocumentLine, width: int) -> Iterator[str]:
    """Yield a line of the document in its colours, broken to the width of the terminal."""
    look = _look(document.plan, line)
    is_data = line.kind == LineKind.DETAIL and line.label in DATA
    text = visible("\n".join(line_text(line, width)))
    for number, fragment in enumerate(fitted(text, width).split("\n")):
        if is_data and number == 0:
            yield click.style(fragment[:INDENT], dim=True) + fragment[INDENT:]
        else:
            yield click.style(fragment, **look)


def _look(plan: Plan, line: DocumentLine) -> dict[str, Any]:
    """Return the arguments of ``click.style`` for a line."""
    if line.kind == LineKind.STEP:
        assert line.entry
        step = line.entry.step
        return {"fg": _colour(plan, step.pool), "bold": not step.inserted}
    if line.kind == LineKind.DETAIL and line.label == "because":
        return {"italic": True, "dim": True}
    return {"bold": line.kind in (LineKind.TITLE, LineKind.TRAINING)}


def _colour(plan: Plan, pool: str) -> str:
    index = [*plan.pools].index(pool)
    return COLOURS[index % len(COLOURS)]


def _lanes(document: PlanDocument, width: int) -> Iterator[str]:
    """Yield what each pool runs in a period of the steady state; a name is as wide as its step lasts."""
    plan = document.plan
    events, period = expected(plan)
    start = min(event.start for event in events if event.iteration == ahead(plan) + 1)
    seconds = document.headline.get("iteration")
    duration = f": {seconds}" if seconds else ", roughly"
    yield f"an iteration of the steady state{duration}"
    columns = width - LABEL
    for pool in plan.pools:
        cells = [" "] * columns
        for event in events:
            if pool not in occupied(event.step):
                continue
            begin = round((event.start - start) / period * columns)
            end = round((event.end - start) / period * columns)
            _write(cells, _padded_name(event.step, end - begin), begin)
        label = visible(pool)[: LABEL - 3]
        yield f"  {label:<{LABEL - 2}}{_coloured_lane(cells, _colour(plan, pool))}"


def _write(cells: list[str], text: str, begin: int) -> None:
    """Write a text into the cells from ``begin`` on, without the characters that lie outside of them."""
    for offset, character in enumerate(text):
        position = begin + offset
        if 0 <= position < len(cells):
            cells[position] = character


def _coloured_lane(cells: Sequence[str], colour: str) -> str:
    """Return a lane in which busy cells have a coloured background. Names of steps have no spaces."""
    lane = ""
    for text in SPACES.split("".join(cells)):
        if text:
            lane += click.style(text, fg=colour, reverse=not text.isspace())
    return lane


def _padded_name(step: Step, width: int) -> str:
    """Return a step's name in ``width`` characters, the last of which separates it from the next step."""
    if width <= 0:
        return ""
    name = visible(step.node)[: width - 1]
    return f"{name:·<{width - 1}}|"


def _memory_bars(plan: Plan, width: int) -> Iterator[str]:
    if not plan.peak:
        return
    yield "memory of a device at its peak"
    columns = width - LABEL - PEAK
    for pool, peak in plan.peak.items():
        full = round(columns * min(peak.bytes / peak.capacity, 1))
        bar = click.style("█" * full, fg=_colour(plan, pool)) + "░" * (columns - full)
        used = f"{size_text(peak.bytes)} of {size_text(peak.capacity)}"
        yield f"  {visible(pool):<{LABEL - 2}.{LABEL - 3}}{bar}  {used}"


def _closing(document: PlanDocument, width: int) -> str:
    """Return steps, times and bytes in one line."""
    steps = document.plan.steps
    inserted = sum(step.inserted for step in steps)
    phrases = [f"{len(steps)} steps, {inserted} of them inserted"]
    if document.plan.predicted:
        for label in ("iteration", "run"):
            if label in document.headline:
                phrases.append(f"{label} {document.headline[label]}")
        moved = sum(step.bytes or 0 for step in steps)
        phrases.append(f"{size_text(moved)} moved")
    text = textwrap.fill("; ".join(phrases), width, break_on_hyphens=False)
    return click.style(text, bold=True)


def tree_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the nodes that the user wrote, with their models and the columns that they read from others.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> print(tree_text(compile_graph("grpo", devices=1)).splitlines()[1])
        └─ prompts (data.prompts)
    """
    lines: list[str] = []
    for phase, steps in plan.phases.items():
        lines.append(TITLES[phase])
        lines += _tree(steps, plan.columns[phase], width)
    return "".join(f"{line}\n" for line in lines)


def _tree(steps: Sequence[Step], columns: Mapping[str, ColumnPlan], width: int) -> Iterator[str]:
    """Yield the nodes of a phase as a tree: a node hangs below the last of those that it reads from."""
    by_name = {step.node: step for step in steps}
    reads = {step.node: sources(step, by_name, columns) for step in steps if not step.inserted}
    children: dict[str, list[str]] = {}
    for node, names in reads.items():
        parent = max(names, key=lambda name: by_name[name].id, default="")
        children.setdefault(parent, []).append(node)
    # graphs can be deep, so a stack of (node, lines drawn before it) takes the place of recursion
    stack = [(node, "") for node in reversed(children.get("", []))]
    while stack:
        node, prefix = stack.pop()
        is_last = not any(other_prefix == prefix for _, other_prefix in stack)
        branch, below = ("└─", "   ") if is_last else ("├─", "│  ")
        deeper = prefix + below
        indent = deeper + ("│    " if node in children else "     ")
        line = f"{prefix}{branch} {_node_text(by_name[node], reads[node])}"
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
        stack += [(child, deeper) for child in reversed(children.get(node, []))]


def _node_text(step: Step, reads: Mapping[str, Sequence[str]]) -> str:
    models = "".join(f" with {model}@{version}" for model, version in step.models.items())
    text = f"{step.node} ({step.op}){models}"
    columns = dict.fromkeys(column for names in reads.values() for column in names)
    if columns:
        text += f"  reads {', '.join(columns)}"
    return text
