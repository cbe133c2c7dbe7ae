"""Prints a column of a plan: its origin, its readers, its lifetime, and its size."""

from collections.abc import Iterator

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.printing.step_text import Detail, sentence
from rlgraph.units import plural

TITLES = {"train": "in every iteration", "eval": "in evaluation"}


def lineage_text(plan: Plan, column: str) -> str:
    """Describe what a plan does with a column, in training and in evaluation.

    Its name is that in the graph, or the name of a copy in the plan, such as ``tokens@balanced/4``.

    Raises:
        GraphError: no step writes such a column.
    """
    lines: list[str] = []
    for phase, columns in plan.columns.items():
        if column not in columns:
            continue
        if not lines:
            lines.append(_type_and_size(column, columns[column]))
        lines += ["", TITLES[phase]]
        for detail in _lineage(plan, phase, column, columns[column]):
            lines.append(f"  {detail.word:<8} {detail.text}")
    if not lines:
        raise _unknown_column(plan, column)
    return "\n".join(lines) + "\n"


def _unknown_column(plan: Plan, column: str) -> GraphError:
    known: dict[str, None] = {}
    for columns in plan.columns.values():
        known.update(dict.fromkeys(columns))
    pruned = [note for note in plan.notes if note.startswith(f"pruned `{column}`")]
    remedy = "; ".join(pruned) or nearest(column, known)
    return fail("unknown-column", f"no step writes a column `{column}`", None, known, remedy)


def _type_and_size(name: str, column: ColumnPlan) -> str:
    """Return text such as ``hidden: float32[samples, width], width = 4096, 16,384 bytes per row``."""
    facts = [f"{name}: {column.type}"]
    for axis, size in zip(column.type.fixed, column.sizes, strict=False):
        if not axis.isdigit():
            facts.append(f"{axis} = {size}")
    facts.append(weight(column))
    return ", ".join(facts)


def weight(column: ColumnPlan) -> str:
    """Return the bytes per row or token of a column; a token column has 8 more bytes per row."""
    kind = column.type
    size = kind.cell_bytes(column.sizes, column.stored)
    if size is None and kind.fixed:
        return "bytes per row unknown: its model's path is open"
    if size is None:
        return f"bytes per row unknown: {kind.dtype}"
    amount = f"{size:,} {plural('byte', size)}"
    if column.stored:
        amount += f" ({column.stored})"
    unit = "token" if kind.axis else "row"
    return f"{amount} per {unit}"


def _lineage(plan: Plan, phase: str, name: str, column: ColumnPlan) -> Iterator[Detail]:
    """Yield the life of a column in a phase, from its writer to the steps that free it and its copies."""
    steps = plan.phases[phase]
    copies = _copies(steps, name)
    yield Detail("domain", _domain(plan.domains[phase][column.domain]))
    for step in steps:
        if name in step.writes:
            yield Detail("written", f"step {step.id}, {sentence(step)}")
    for copy, step in copies.items():
        yield Detail("copied", f"step {step.id}, as {copy}, because {step.because}")
    yield from _readers(plan, steps, name, (name, *copies))
    yield from _freed(steps, name, copies)
    if phase == "eval":
        yield from _reports(plan, name)


def _freed(steps: tuple[Step, ...], name: str, copies: dict[str, Step]) -> Iterator[Detail]:
    """Yield the steps that free a column and its copies."""
    step_that_frees: dict[str, Step] = {}
    for step in steps:
        step_that_frees.update(dict.fromkeys(step.frees, step))
    for copy in (name, *copies):
        if copy not in step_that_frees:
            continue
        text = f"step {step_that_frees[copy].id}"
        if copies:  # otherwise the column itself is meant
            text += f", {copy}"
        yield Detail("freed", text)


def _reports(plan: Plan, name: str) -> Iterator[Detail]:
    metrics = [metric for metric, column in plan.report.items() if column == name]
    if metrics:
        yield Detail("kept", f"to report its mean as {', '.join(metrics)}")


def _copies(steps: tuple[Step, ...], name: str) -> dict[str, Step]:
    """Return each copy of a column, and each copy of a copy -> the step that makes it."""
    copies: dict[str, Step] = {}
    inserted = [step for step in steps if step.inserted]
    for step in inserted:
        # a sync reads and writes no columns, and a merge makes one column of several
        for source, copy in zip(step.reads, step.writes, strict=False):
            if source in (name, *copies):
                copies[copy] = step
    return copies


def _readers(plan: Plan, steps: tuple[Step, ...], name: str, copies: tuple[str, ...]) -> Iterator[Detail]:
    """Yield each read of a column, or of a copy, by the op of a user's step."""
    for step in steps:
        if step.inserted:
            continue
        origin = plan.columns[step.phase][name].origin
        for parameter, column in plan.functions[step.phase][step.node].ins.items():
            if column not in copies:
                continue
            text = f"step {step.id}, {step.node} ({step.op})"
            if parameter != origin:
                text += f", as its {parameter}"
            if column != name:
                text += f", from {column}"
            yield Detail("read", text)


def _domain(domain: GraphDomain) -> str:
    """Return which rows a column has, and how many of them there are per row of another domain."""
    if domain.held:
        return f"{domain.name}, rows of {domain.held} that `{domain.maker}` holds"
    if domain.parts:
        return f"{domain.name}, the rows of {' and of '.join(domain.parts)}"
    if domain.parent is None:
        return domain.name
    if domain.filtered:
        return f"{domain.name}, those of {domain.parent} that `{domain.maker}` keeps"
    if domain.most:
        rows = f"{domain.expected:g} rows for each of {domain.parent} expected"
        return f"{domain.name}, {rows}, {domain.most} at most"
    rows = plural("row", domain.times)
    return f"{domain.name}, {domain.times} {rows} for each of {domain.parent}"
