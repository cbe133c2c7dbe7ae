"""Prints a column of a plan: its origin, its readers, its lifetime, and its size."""

from collections.abc import Iterator

from rlgraph.errors import fail, nearest
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.printing.plan_text import sentence


def lineage_text(plan: Plan, column: str) -> str:
    """Describe what a plan does with a column, in training and in evaluation.

    Its name is that in the graph, or one copy's in the plan, such as ``tokens@balanced/4``.

    Raises:
        GraphError: no step writes such a column.
    """
    phases = {phase: columns[column] for phase, columns in plan.columns.items() if column in columns}
    if not phases:
        known = [*dict.fromkeys(name for columns in plan.columns.values() for name in columns)]
        pruned = [note for note in plan.notes if note.startswith(f"pruned `{column}`")]
        remedy = "; ".join(pruned) or nearest(column, known)
        raise fail("unknown-column", f"no step writes a column `{column}`", None, known, remedy)
    first = next(iter(phases.values()))
    pairs = zip(first.type.fixed, first.sizes, strict=False)
    sizes = [f"{axis} = {size}" for axis, size in pairs if not axis.isdigit()]
    lines = [", ".join([f"{column}: {first.type}", *sizes, weight(first)])]
    for phase, planned in phases.items():
        lines += ["", "in every iteration" if phase == "train" else "in evaluation"]
        lines += [f"  {word:<8} {text}" for word, text in _phase(plan, phase, column, planned)]
    return "\n".join(lines) + "\n"


def weight(column: ColumnPlan) -> str:
    """Return the bytes per row or token of a column; a token column has 8 more bytes per row."""
    kind = column.type
    size = kind.cell_bytes(column.sizes, column.stored)
    if size is None:
        unknown = kind.dtype if not kind.fixed else "its model's path is open"
        return f"bytes per row unknown: {unknown}"
    stored = f" ({column.stored})" if column.stored else ""
    return f"{size:,} byte{'s' * (size != 1)}{stored} per {'token' if kind.axis else 'row'}"


def _phase(plan: Plan, phase: str, name: str, column: ColumnPlan) -> Iterator[tuple[str, str]]:
    steps = plan.phases[phase]
    copies = _copies(steps, name)
    yield "domain", _domain(plan.domains[phase][column.domain])
    for step in steps:
        if name in step.writes:
            yield "written", f"step {step.id}, {sentence(step)}"
    for copy, step in copies.items():
        yield "copied", f"step {step.id}, as {copy}, because {step.because}"
    yield from _readers(plan, steps, name, (name, *copies))
    for copy in (name, *copies):
        for step_id in [step.id for step in steps if copy in step.frees][:1]:
            yield "freed", f"step {step_id}" + (f", {copy}" if copies else "")
    metrics = [metric for metric, reported in plan.report.items() if reported == name and phase == "eval"]
    if metrics:
        yield "kept", f"to report its mean as {', '.join(metrics)}"


def _copies(steps: tuple[Step, ...], name: str) -> dict[str, Step]:
    """Return copies of a column, and copies of those -> the steps that make them."""
    copies: dict[str, Step] = {}
    for step in steps:
        if step.inserted:
            pairs = zip(step.reads, step.writes, strict=False)  # a sync has neither
            copies |= {copy: step for read, copy in pairs if read == name or read in copies}
    return copies


def _readers(
    plan: Plan, steps: tuple[Step, ...], name: str, copies: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for step in (step for step in steps if not step.inserted):
        origin = plan.columns[step.phase][name].origin
        for parameter, column in plan.functions[step.phase][step.node].ins.items():
            if column in copies:
                as_parameter = f", as its {parameter}" if parameter != origin else ""
                copy = f", from {column}" if column != name else ""
                yield "read", f"step {step.id}, {step.node} ({step.op}){as_parameter}{copy}"


def _domain(domain: GraphDomain) -> str:
    if domain.held:
        return f"{domain.name}, rows of {domain.held} that `{domain.maker}` holds"
    if domain.parent is None:
        return domain.name + (f", the rows of {' and of '.join(domain.parts)}" if domain.parts else "")
    if domain.filtered:
        return f"{domain.name}, those of {domain.parent} that `{domain.maker}` keeps"
    if domain.most:
        rows = f"{domain.expected:g} rows for each of {domain.parent} expected, {domain.most} at most"
        return f"{domain.name}, {rows}"
    return f"{domain.name}, {domain.times} row{'s' * (domain.times != 1)} for each of {domain.parent}"
