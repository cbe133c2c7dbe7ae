"""Selects what of an iteration's columns the run's directory keeps: first rows as samples, and records.

A samples file has the first rows of an iteration, whichever devices they lie on:

    {"tokens": "12+34=46", "responses": "46", "rewards": 1.0,
     "pieces": ["1", "2", "+", ...], "loss_mask": [false, ...], "old_logprobs": [0.0, ...], ...}

A row that a filter dropped has null where others have what was computed for the rows that stay. A record has
all rows, to train from and to replay. With ``schedule.record_every`` that is of the first iteration, and of
those behind its intervals: they follow the checkpoints of an equal ``save_every``.
"""

from typing import Any, NamedTuple

import numpy as np

from rlgraph.ir.actions import Copy
from rlgraph.ir.domains import is_part
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.record_file import RecordMetadata
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.messages.tasks import Excerpt, Place

ROWS = 32  # rows per samples file
WHOLE = tuple(f"{dtype}[samples]" for dtype in ("text", "json", "float32", "boolean", "int64"))
EACH = ("float32[samples, tokens]", "boolean[samples, tokens]", "int64[samples, tokens]")


def sample_columns(plan: Plan, phase: str) -> list[str]:
    """Return columns that tell what the model wrote and what was computed of it; none if no model writes."""
    columns = plan.columns[phase]
    rows = next((column.domain for column in columns.values() if column.said == "responses"), None)
    if rows is None:
        return []
    shown = {name: c for name, c in columns.items() if not c.moved and c.type in (*WHOLE, *EACH)}
    return [name for name, c in shown.items() if is_part(plan.domains[phase], c.domain, rows)]


class RowSource(NamedTuple):
    """Some rows of a column on a worker: the reference of its part of the column, and which rows of that."""

    place: Place
    part: Any
    rows: Any


def excerpts(execution: Execution) -> list[tuple[Excerpt, list[RowSource]]]:
    """Return the first rows of each of the columns, and where they are; tokens first.

    Of several columns of one name, that of the most rows is taken.
    """
    held = [name for name in sample_columns(execution.plan, execution.phase) if execution.refs.get(name)]
    columns = [execution.columns[name] for name in held]
    base = next((column.domain for column in columns if column.said == "tokens"), None)
    if base is None:
        return []
    chosen: dict[str, tuple[Excerpt, list[RowSource]]] = {}
    for name, column in zip(held, columns, strict=True):
        if column.said not in chosen and is_part(execution.domains, column.domain, base):
            chosen[column.said] = _excerpt(execution, name, base)
    return [chosen.pop("tokens"), *chosen.values()]


def _excerpt(execution: Execution, name: str, base: str) -> tuple[Excerpt, list[RowSource]]:
    column, pool, lines, sources = execution.columns[name], execution.pools[name], [], list[RowSource]()
    origin = execution.rows.within(column.domain, base)
    for device, held in enumerate(execution.rows.layout(column.domain, column.layout, pool)):
        wanted = np.flatnonzero(origin[held] < ROWS)
        if len(wanted) or not sources:  # a part at least, of no rows
            lines.append(origin[held][wanted])
            sources.append(RowSource((pool, device), execution.reference(name, device).location, wanted))
    return Excerpt(column.said, np.concatenate(lines), len(sources)), sources


def recorded_columns(plan: Plan) -> frozenset[str]:
    """Return the columns of the graph's own nodes and those that a region hands on, without copies."""
    steps = [step for step in plan.steps if not isinstance(step.action, Copy)]
    return frozenset(column for step in steps for column in step.writes)


def records(execution: Execution) -> list[RecordMetadata]:
    """Return the metadata of what is recorded of an iteration: a file of each domain, with its columns."""
    types: dict[str, dict[str, str]] = {}
    for name in sorted(recorded_columns(execution.plan) & execution.refs.keys()):
        types.setdefault(execution.columns[name].domain, {})[name] = execution.columns[name].type
    rows = [(execution.domains[domain], columns) for domain, columns in types.items()]
    return [RecordMetadata(domain.name, domain.parent, domain.times, columns) for domain, columns in rows]
