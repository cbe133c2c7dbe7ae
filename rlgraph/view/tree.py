"""The nodes of a graph as a tree in a terminal: each node once, below the node that it reads last."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rlgraph.plan import Plan, Step
from rlgraph.view.links import phases

WIDTH = 100  # characters of a line


def tree_text(plan: Plan) -> str:
    """The nodes that the user wrote, with their models and what they read of which other node.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> print(tree_text(compile_graph("grpo", devices=1)).splitlines()[1])
        └─ prompts (data.prompts)
    """
    lines = []
    for phase, steps in phases(plan).items():
        lines.append("in every iteration" if phase == "train" else "in evaluation")
        lines += _phase(steps)
    return "\n".join(lines) + "\n"


def _phase(steps: Sequence[Step]) -> Iterator[str]:
    reads = {step.node: _sources(step, steps) for step in steps if not step.inserted}
    by_name = {step.node: step for step in steps}
    below: dict[str, list[str]] = {}
    for node, sources in reads.items():
        last = max(sources, key=lambda name: by_name[name].id, default="")
        below.setdefault(last, []).append(node)
    # what is still to be written, and the lines before it: graphs are deep, so that this does not recurse
    stack = [(node, "") for node in reversed(below.get("", []))]
    while stack:
        node, pad = stack.pop()
        last_one = not any(other_pad == pad for _, other_pad in stack)
        deeper, children = pad + ("   " if last_one else "│  "), below.get(node, [])
        line = f"{pad}{'└─' if last_one else '├─'} {_said(by_name[node], reads[node])}"
        indent = deeper + ("│    " if children else "     ")
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        stack += [(child, deeper) for child in reversed(children)]


def _sources(step: Step, steps: Sequence[Step]) -> dict[str, list[str]]:
    """Node -> the columns that a step has of it, through the copies that were inserted between."""
    writer = {column: other for other in steps for column in other.writes}
    found: dict[str, list[str]] = {}
    for name in step.reads:
        column, source = name, writer[name]
        while source.inserted:
            column = source.reads[source.writes.index(column)]
            source = writer[column]
        found.setdefault(source.node, []).append(column)
    return found


def _said(step: Step, sources: Mapping[str, Sequence[str]]) -> str:
    models = "".join(f" with {model}@{version}" for model, version in step.models.items())
    columns = ", ".join(dict.fromkeys(column for names in sources.values() for column in names))
    return f"{step.node} ({step.op}){models}" + (f"  reads {columns}" if columns else "")
