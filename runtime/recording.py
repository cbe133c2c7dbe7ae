"""Keep the columns of some iterations in the run's directory: to train from, and to run an iteration again.

With ``schedule.record_every: k`` these are iterations 1, 1 + k, 1 + 2k, and so on: those that follow the
checkpoints of ``save_every: k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlgraph.nodes.recordfile import About, Recorded, file_of, write
from rlgraph.plan import Plan
from rlgraph.runtime.columns import Part, gather

if TYPE_CHECKING:
    from rlgraph.runtime.walk import Walk


@dataclass(frozen=True)
class Gathering:
    """A column of a file: ``pick`` is an index into the rows of its ``parts`` parts, laid end to end."""

    column: str
    pick: Any
    parts: int


def is_recorded(every: int, iteration: int) -> bool:
    """Whether the columns of an iteration, counted from 1, are kept.

    Example:
        >>> [iteration for iteration in range(1, 9) if is_recorded(3, iteration)]
        [1, 4, 7]
    """
    return bool(every) and (iteration - 1) % every == 0


def recorded_columns(plan: Plan) -> frozenset[str]:
    """What the graph's own nodes write, and what a region hands on; copies of them are made again."""
    steps = [step for step in plan.steps if step.kind in ("run", "collect")]
    return frozenset(column for step in steps for column in step.writes)


def gatherings(walk: Walk) -> dict[str, tuple[list[Gathering], list[Any]]]:
    """Domain -> its columns, and references of the parts that hold them; each with its rows in order."""
    found: dict[str, tuple[list[Gathering], list[Any]]] = {}
    for name in sorted(recorded_columns(walk.plan) & walk.refs.keys()):
        column = walk.columns[name]
        held = walk.rows.layout(column.domain, column.layout, walk.pools[name])
        sources = [device for device, part in enumerate(walk.refs[name]) if part is not None]
        pick = np.argsort(np.concatenate([held[source] for source in sources]))
        columns, parts = found.setdefault(column.domain, ([], []))
        columns.append(Gathering(name, pick, len(sources)))
        parts += [walk.refs[name][source] for source in sources]
    return found


def write_recorded(folder: str, about: About, columns: Sequence[Gathering], parts: Sequence[Part]) -> None:
    """Write the file of one domain; ``parts`` are those of the first column, then of the next."""
    found, at = {}, 0
    for column in columns:
        part = gather(parts[at : at + column.parts], column.pick)
        found[column.column] = Recorded(part.values, part.offsets)
        at += column.parts
    write(Path(folder, file_of(about.domain)), about, found)


def about_domain(plan: Plan, domain: str, columns: Sequence[Gathering]) -> About:
    """What the file of a domain says of itself."""
    types = {column.column: plan.columns["train"][column.column].type for column in columns}
    one = plan.columns["train"][columns[0].column]
    return About(domain, one.parent, one.times, types)
