"""Selects the columns of an iteration that go to the run's directory: first rows as samples, and records.

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
    """Return columns that show what the model wrote and what was computed of it; none if no model writes."""
    columns = plan.columns[phase]
    responses = [column for column in columns.values() if column.graph_name == "responses"]
    if not responses:
        return []
    samples = responses[0].domain
    names = []
    for name, column in columns.items():
        is_shown = column.type in (*WHOLE, *EACH) and not column.moved
        if is_shown and is_part(plan.domains[phase], column.domain, samples):
            names.append(name)
    return names


class RowSource(NamedTuple):
    """Some rows of a column on a worker: the reference of its chunk of the column, and which rows of that."""

    place: Place
    chunk: Any
    rows: Any


def excerpts(execution: Execution) -> list[tuple[Excerpt, list[RowSource]]]:
    """Return the first rows of each of the columns, and where they are; tokens come first.

    Of several columns of one name, that of the most rows is taken.
    """
    names = [name for name in sample_columns(execution.plan, execution.phase) if execution.refs.get(name)]
    tokens = [name for name in names if execution.columns[name].graph_name == "tokens"]
    if not tokens:
        return []
    samples = execution.columns[tokens[0]].domain
    chosen: dict[str, tuple[Excerpt, list[RowSource]]] = {}
    for name in names:
        column = execution.columns[name]
        if column.graph_name not in chosen and is_part(execution.domains, column.domain, samples):
            chosen[column.graph_name] = _excerpt(execution, name, samples)
    return [chosen.pop("tokens"), *chosen.values()]


def _excerpt(execution: Execution, name: str, samples: str) -> tuple[Excerpt, list[RowSource]]:
    """Return the rows of a column that belong to the first rows of ``samples``."""
    column = execution.columns[name]
    pool = execution.pools[name]
    lines = []  # of the samples file, for each row
    sources: list[RowSource] = []
    sample_of_row = execution.rows.within(column.domain, samples)
    layout = execution.rows.layout(column.domain, column.layout, pool)
    for device, device_rows in enumerate(layout):
        line_of_row = sample_of_row[device_rows]
        rows = np.flatnonzero(line_of_row < ROWS)
        if len(rows) or not sources:  # at least one chunk, even of no rows
            lines.append(line_of_row[rows])
            sources.append(RowSource((pool, device), execution.reference(name, device).location, rows))
    return Excerpt(column.graph_name, np.concatenate(lines), len(sources)), sources


def recorded_columns(plan: Plan) -> frozenset[str]:
    """Return the columns of the graph's own nodes and those that a region hands on, without copies."""
    columns = set[str]()
    for step in plan.steps:
        if not isinstance(step.action, Copy):
            columns.update(step.writes)
    return frozenset(columns)


def records(execution: Execution) -> list[RecordMetadata]:
    """Return the metadata of what is recorded of an iteration: a file of each domain, with its columns."""
    types: dict[str, dict[str, str]] = {}  # domain -> column -> its type
    for name in sorted(recorded_columns(execution.plan) & execution.refs.keys()):
        column = execution.columns[name]
        types.setdefault(column.domain, {})[name] = column.type
    metadata = []
    for domain_name, columns in types.items():
        domain = execution.domains[domain_name]
        metadata.append(RecordMetadata(domain.name, domain.parent, domain.times, columns))
    return metadata
