"""The row buffer: kept rows as references of column parts, and where each row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlgraph.ops.buffer_policy import Group
from rlgraph.runtime.messages.tasks import ColumnRef

Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]  # arguments of a call, and the parts that it reads


@dataclass(frozen=True)
class Selection:
    """Some rows of a column: references of its parts, the rows of each part, and where each row is.

    ``places`` is int64 ``[rows]``, indices into the parts' rows laid end to end.
    """

    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    places: Any

    def take(self, rows: Any) -> Selection:
        """Return some of the rows, with the parts that they lie in; one part at least."""
        start = np.cumsum((0, *self.sizes))
        places = self.places[rows]
        owner = np.searchsorted(start, places, side="right") - 1
        used = sorted(set(owner.tolist())) or [0]
        sizes = tuple(self.sizes[index] for index in used)
        shift = np.zeros(len(start), np.int64)
        shift[used] = np.cumsum((0, *sizes))[:-1] - start[used]
        return Selection(tuple(self.parts[index] for index in used), sizes, places + shift[owner])


def end_to_end(selections: Sequence[Selection]) -> Selection:
    """Return the rows of several selections of one column, one after the other."""
    parts = list[Any]()
    sizes = list[int]()
    places = []
    for selection in selections:
        places.append(selection.places + sum(sizes))
        parts += selection.parts
        sizes += selection.sizes
    return Selection(tuple(parts), tuple(sizes), np.concatenate(places))


def gathering(columns: Sequence[Selection]) -> Arguments:
    """Return arguments and parts by which ``Worker.repartition`` joins the rows of some columns."""
    picks = [column.places for column in columns]
    counts = [len(column.parts) for column in columns]
    refs = list[Any]()
    for column in columns:
        refs += column.parts
    return (picks, counts), tuple(refs)


@dataclass(frozen=True)
class BufferedRows:
    """Rows that a filter kept, in the order in which they will be used.

    Arrays are int64 ``[rows]``: tokens, the number of the prompt, and the iteration, from 0, in which it was
    begun.
    """

    lengths: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    prompts: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    made: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: Mapping[str, Selection] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Any) -> BufferedRows:
        """Return some of the rows, by their indices."""
        columns = {name: selection.take(rows) for name, selection in self.columns.items()}
        return BufferedRows(self.lengths[rows], self.prompts[rows], self.made[rows], columns)

    def left(self, rows: Any) -> BufferedRows:
        """Return some of the rows; where there are none, no part of a column is held on to."""
        return self.take(rows) if len(rows) else BufferedRows()

    def groups(self, iteration: int) -> list[Group]:
        """Return its groups: rows that follow one another and are of one prompt."""
        starts = np.flatnonzero(np.diff(self.prompts, prepend=-1))
        ages, ends = iteration - self.made[starts], [*starts[1:], len(self)]
        tokens = np.add.reduceat(self.lengths, starts) if len(starts) else ()
        each = zip(self.prompts[starts], ages, np.subtract(ends, starts), tokens, strict=True)
        return [Group(*(int(number) for number in group)) for group in each]

    def gathering(self, columns: Sequence[str]) -> Arguments:
        """Return the same as ``gathering`` of these columns of all rows."""
        return gathering([self.columns[name] for name in columns])

    def record(self) -> dict[str, list[Any]]:
        """Return JSON values: the columns by their names alone."""
        arrays = {name: getattr(self, name).tolist() for name in ("lengths", "prompts", "made")}
        return {**arrays, "columns": [*self.columns]}

    @staticmethod
    def recorded(record: Mapping[str, Sequence[Any]], parts: Sequence[Any]) -> BufferedRows:
        """Restore a ``record`` with its columns: each in one part that has the rows in order."""
        lengths, prompts, made = (np.array(record[name], np.int64) for name in ("lengths", "prompts", "made"))
        rows = len(lengths)
        refs = [ColumnRef(name, part) for name, part in zip(record["columns"], parts, strict=True)]
        columns = {ref.name: Selection((ref,), (rows,), np.arange(rows)) for ref in refs}
        return BufferedRows(lengths, prompts, made, columns)


def joined(buffers: Sequence[BufferedRows]) -> BufferedRows:
    """Return the rows of several, one after the other; those without rows have no columns to go by."""
    buffers = [buffered for buffered in buffers if len(buffered)] or buffers[:1]
    if len(buffers) == 1:
        return buffers[0]
    names = buffers[0].columns
    columns = {name: end_to_end([buffered.columns[name] for buffered in buffers]) for name in names}
    return BufferedRows(
        lengths=np.concatenate([buffered.lengths for buffered in buffers]),
        prompts=np.concatenate([buffered.prompts for buffered in buffers]),
        made=np.concatenate([buffered.made for buffered in buffers]),
        columns=columns,
    )


@dataclass(frozen=True)
class Waiting:
    """Rows that a region leaves for the next iteration: those that stayed, and unfinished groups.

    Of the latter, the columns of the source, one row per prompt, and what each of their samples has so far.
    """

    rows: BufferedRows = BufferedRows()
    prompts: BufferedRows = BufferedRows()
    samples: BufferedRows = BufferedRows()

    def of_groups(self, is_wanted: Any) -> Waiting:
        """Return some of the unfinished groups, by bool ``[groups]``."""
        if is_wanted.all():
            return self
        is_sample_wanted = np.isin(self.samples.prompts, self.prompts.prompts[is_wanted])
        return Waiting(
            prompts=self.prompts.left(np.flatnonzero(is_wanted)),
            samples=self.samples.left(np.flatnonzero(is_sample_wanted)),
        )

    def parts(self) -> dict[str, BufferedRows]:
        """Return those that have rows, by name."""
        buffers = {name: getattr(self, name) for name in ("rows", "prompts", "samples")}
        return {name: buffered for name, buffered in buffers.items() if len(buffered)}


def together(groups: Sequence[Waiting]) -> Waiting:
    """Return the unfinished groups of several, one after the other."""
    prompts = joined([waiting.prompts for waiting in groups])
    samples = joined([waiting.samples for waiting in groups])
    return Waiting(prompts=prompts, samples=samples)
