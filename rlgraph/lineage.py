"""Where one column of a plan comes from, who reads it, when it is freed, and what it weighs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.plan import ColumnPlan, Plan, Step
from rlgraph.text import sentence

BYTES = {"float32": 4, "int64": 8, "boolean": 1}  # of one value, as columns lie in memory


def lineage_text(plan: Plan, column: str) -> str:
    """What a plan does with a column, in training and in evaluation.

    Args:
        plan: of the graph; its devices decide which copies are made.
        column: as the graph calls it, or one copy of it as the plan does, such as ``tokens@balanced/4``.

    Raises:
        GraphError: no step writes such a column.
    """
    phases = {phase: columns[column] for phase, columns in plan.columns.items() if column in columns}
    if not phases:
        raise _unknown(plan, column)
    kind = next(iter(phases.values())).type
    lines = [f"{column}: {kind}, {weight(kind)}"]
    for phase, found in phases.items():
        lines += ["", "in every iteration" if phase == "train" else "in evaluation"]
        lines += [f"  {word:<8} {text}" for word, text in _phase(plan, phase, column, found)]
    return "\n".join(lines) + "\n"


def weight(kind: str) -> str:
    """What a row of a column type weighs, in bytes; a token column has offsets besides, 8 bytes a row.

    Example:
        >>> [weight(kind) for kind in ("float32[samples]", "int64[samples, tokens]", "text[prompts]")]
        ['4 bytes a row', '8 bytes a token', 'bytes a row unknown: text']
    """
    dtype, _, axes = kind.partition("[")
    if dtype not in BYTES:
        return f"bytes a row unknown: {dtype}"
    return f"{BYTES[dtype]} byte{'s' * (BYTES[dtype] != 1)} a {'token' if ',' in axes else 'row'}"


def _phase(plan: Plan, phase: str, name: str, column: ColumnPlan) -> Iterator[tuple[str, str]]:
    steps = plan.steps if phase == "train" else plan.eval_steps
    copies = _copies(steps, name)
    yield "domain", _domain(column)
    for step in steps:
        if name in step.writes:
            yield "written", f"step {step.id}, {sentence(step)}"
    for copy, step in copies.items():
        yield "copied", f"step {step.id}, as {copy}, because {step.because}"
    yield from _readers(plan, steps, name, (name, *copies))
    for copy in (name, *copies):
        step_id = next((step.id for step in steps if copy in step.frees), None)
        if step_id:
            yield "freed", f"step {step_id}" + (f", {copy}" if copies else "")
    metrics = [metric for metric, reported in plan.report.items() if reported == name and phase == "eval"]
    if metrics:
        yield "kept", f"to report its mean as {', '.join(metrics)}"


def _copies(steps: tuple[Step, ...], name: str) -> dict[str, Step]:
    """Copies of a column (moved, repeated to samples, filtered), and copies of those -> who makes them."""
    found: dict[str, Step] = {}
    for step in steps:
        if step.inserted:
            pairs = zip(step.reads, step.writes, strict=False)  # a sync has neither
            found |= {copy: step for read, copy in pairs if read == name or read in found}
    return found


def _readers(
    plan: Plan, steps: tuple[Step, ...], name: str, copies: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for step in steps:
        if step.inserted:
            continue
        ins = plan.functions[step.phase][step.node].ins
        for parameter, column in ins.items():
            if column in copies:
                as_parameter = f", as its {parameter}" if parameter != re.split("[@*/]", name)[0] else ""
                copy = f", from {column}" if column != name else ""
                yield "read", f"step {step.id}, {step.node} ({step.op}){as_parameter}{copy}"


def _domain(column: ColumnPlan) -> str:
    if column.parent is None:
        return column.domain
    if "/" in column.domain:
        return f"{column.domain}, those of {column.parent} that `{column.domain.rpartition('/')[2]}` keeps"
    return f"{column.domain}, {column.times} row{'s' * (column.times != 1)} for each of {column.parent}"


def _unknown(plan: Plan, name: str) -> GraphError:
    known = [*dict.fromkeys(column for columns in plan.columns.values() for column in columns)]
    law = f"no step writes a column `{name}`"
    pruned = [note for note in plan.notes if note.startswith(f"pruned `{name}`")]
    return fail("unknown-column", law, None, known, "; ".join(pruned) or nearest(name, known))
