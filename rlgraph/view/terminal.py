"""Shows a plan in a terminal: colours by pool, memory as bars, the schedule as lanes, nodes as a tree."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import click

from rlgraph.errors import fitted, visible
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.planning.simulate import occupied
from rlgraph.printing.headline import headline
from rlgraph.printing.plan_text import plan_text
from rlgraph.units import size_text
from rlgraph.view.drawings.boxes import sources
from rlgraph.view.timeline import ahead, expected

COLOURS = ("blue", "magenta", "green", "yellow", "cyan", "red")
BUSY = re.compile(r"( +)")
STEP = re.compile(r"^([ +!]) +\d+\. ")
WIDTH, LABEL = 100, 16  # characters per line unless told, and before a lane or a bar


def terminal_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as text, in colours, with lanes and bars, for a terminal of so many columns."""
    parts = _lanes(plan, width), _bars(plan, width)
    lines = [*_coloured(plan, width), "", *chain(*parts), "", _closing(plan, width)]
    return "\n".join(lines) + "\n"


def _coloured(plan: Plan, width: int) -> Iterator[str]:
    steps = iter((*plan.eval_steps, *plan.steps))  # steps in the order of the text
    look: dict[str, Any] = {}
    for number, line in enumerate(plan_text(plan, width=width).splitlines()):
        if head := STEP.match(line):
            look = {"fg": _colour(plan, next(steps).pool), "bold": head[1] == " "}
        elif line.startswith("         because "):
            look = {"italic": True, "dim": True}
        elif not line.startswith(" " * 17):  # else the line before goes on
            look = {"bold": number == 0 or line.startswith("repeat ")}
        for part in fitted(line, width).split("\n"):
            named = re.match(r"^ {9}(reads|writes|frees|takes) ", part)
            yield click.style(part[:17], dim=True) + part[17:] if named else click.style(part, **look)


def _colour(plan: Plan, pool: str) -> str:
    return COLOURS[[*plan.pools].index(pool) % len(COLOURS)]


def _lanes(plan: Plan, width: int) -> Iterator[str]:
    """Yield what each pool runs in a period of the steady state; a name is as wide as its step lasts."""
    events, period = expected(plan)
    middle = [event for event in events if event.iteration == ahead(plan) + 1]
    start = min(event.start for event in middle)
    took = f": {said['iteration']}" if (said := headline(plan)) else ", roughly"
    yield f"an iteration of the steady state{took}"
    room = width - LABEL
    for pool in plan.pools:
        cells = [" "] * room
        for event in events:
            if pool in occupied(event.step):
                first, last = (round((at - start) / period * room) for at in (event.start, event.end))
                name = _fitted(event.step, last - first)
                cells[max(first, 0) : max(min(last, room), 0)] = name[max(-first, 0) : max(room - first, 0)]
        colour = _colour(plan, pool)
        parts = BUSY.split("".join(cells[:room]))  # names of steps have no spaces
        lane = "".join(click.style(part, fg=colour, reverse=not part.isspace()) for part in parts if part)
        yield f"  {visible(pool)[: LABEL - 3]:<{LABEL - 2}}{lane}"


def _fitted(step: Step, width: int) -> str:
    """Return a step's name in so many characters, the last of which parts it from the next."""
    return f"{visible(step.node)[: width - 1]:·<{width - 1}}|" if width > 0 else ""


def _bars(plan: Plan, width: int) -> Iterator[str]:
    if plan.peak:
        yield "memory of a device at its peak"
    for pool, peak in (plan.peak or {}).items():
        room = width - LABEL - 24
        full = round(room * min(peak.bytes / peak.capacity, 1))
        bar = click.style("█" * full, fg=_colour(plan, pool)) + "░" * (room - full)
        said = f"{size_text(peak.bytes)} of {size_text(peak.capacity)}"
        yield f"  {visible(pool):<{LABEL - 2}.{LABEL - 3}}{bar}  {said}"


def _closing(plan: Plan, width: int) -> str:
    """Return steps, times and bytes in one line."""
    inserted = sum(step.inserted for step in plan.steps)
    parts = [f"{len(plan.steps)} steps, {inserted} of them inserted"]
    if plan.predicted:
        said = headline(plan)
        parts += [f"{label} {said[label]}" for label in ("iteration", "run") if label in said]
        parts.append(f"{size_text(sum(step.bytes or 0 for step in plan.steps))} moved")
    return click.style(textwrap.fill("; ".join(parts), width, break_on_hyphens=False), bold=True)


def tree_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the nodes that the user wrote, with their models and the columns that they read of others.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> print(tree_text(compile_graph("grpo", devices=1)).splitlines()[1])
        └─ prompts (data.prompts)
    """
    titles = {"train": "in every iteration", "eval": "in evaluation"}
    lines = (
        (titles[phase], *_tree(steps, plan.columns[phase], width)) for phase, steps in plan.phases.items()
    )
    return "".join(f"{line}\n" for line in chain(*lines))


def _tree(steps: Sequence[Step], columns: Mapping[str, ColumnPlan], width: int) -> Iterator[str]:
    by_name = {step.node: step for step in steps}
    reads = {step.node: sources(step, by_name, columns) for step in steps if not step.inserted}
    below: dict[str, list[str]] = {}
    for node, read in reads.items():
        last = max(read, key=lambda name: by_name[name].id, default="")
        below.setdefault(last, []).append(node)
    # what is still to be written, and the lines before it: graphs are deep, so that this does not recurse
    stack = [(node, "") for node in reversed(below.get("", []))]
    while stack:
        node, pad = stack.pop()
        last_one = not any(other_pad == pad for _, other_pad in stack)
        deeper, children = pad + ("   " if last_one else "│  "), below.get(node, [])
        line = f"{pad}{'└─' if last_one else '├─'} {_node(by_name[node], reads[node])}"
        indent = deeper + ("│    " if children else "     ")
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
        stack += [(child, deeper) for child in reversed(children)]


def _node(step: Step, read: Mapping[str, Sequence[str]]) -> str:
    models = "".join(f" with {model}@{version}" for model, version in step.models.items())
    columns = ", ".join(dict.fromkeys(column for names in read.values() for column in names))
    return f"{step.node} ({step.op}){models}" + (f"  reads {columns}" if columns else "")
