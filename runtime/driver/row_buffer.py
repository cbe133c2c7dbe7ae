"""The row buffer: kept rows as references of chunks of columns, and where each row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rlgraph.ops.buffer_policy import Group
from rlgraph.runtime.messages.tasks import ColumnRef

Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]  # arguments of a call, and the chunks that it reads


@dataclass(frozen=True)
class Selection:
    """Some rows of a column: references of its chunks, the rows of each chunk, and where each row is.

    ``places`` is int64 ``[rows]``, indices into the rows of the chunks laid end to end.
    """

    refs: tuple[Any, ...]
    sizes: tuple[int, ...]
    places: Any

    def take(self, rows: Any) -> Selection:
        """Return some of the rows, with the chunks that they lie in; one chunk at least."""
        start = np.cumsum((0, *self.sizes))
        places = self.places[rows]
        owner = np.searchsorted(start, places, side="right") - 1
        used = sorted(set(owner.tolist())) or [0]
        sizes = tuple(self.sizes[index] for index in used)
        shift = np.zeros(len(start), np.int64)
        shift[used] = np.cumsum((0, *sizes))[:-1] - start[used]
        return Selection(tuple(self.refs[index] for index in used), sizes, places + shift[owner])


def end_to_end(selections: Sequence[Selection]) -> Selection:
    """Return the rows of several selections of one column, one after the other."""
    refs = list[Any]()
    sizes = list[int]()
    places = []
    for selection in selections:
        places.append(selection.places + sum(sizes))
        refs += selection.refs
        sizes += selection.sizes
    return Selection(tuple(refs), tuple(sizes), np.concatenate(places))


def gathering(columns: Sequence[Selection]) -> Arguments:
    """Return arguments and chunks by which ``Worker.repartition`` joins the rows of some columns."""
    picks = [column.places for column in columns]
    counts = [len(column.refs) for column in columns]
    refs = list[Any]()
    for column in columns:
        refs += column.refs
    return (picks, counts), tuple(refs)


@dataclass(frozen=True)
class BufferedRows:
    """Rows that a filter kept, in the order in which they will be used.

    Invariants:
        - ``lengths``, ``prompts`` and ``iterations`` are int64 ``[rows]``, and each column has as many rows.
        - Rows of one prompt follow one another.
    """

    lengths: Any = field(default_factory=lambda: np.zeros(0, np.int64))  # tokens
    prompts: Any = field(default_factory=lambda: np.zeros(0, np.int64))  # the number of the prompt
    iterations: Any = field(default_factory=lambda: np.zeros(0, np.int64))  # from 0, in which it was begun
    columns: Mapping[str, Selection] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Any) -> BufferedRows:
        """Return some of the rows, by their indices."""
        columns = {name: selection.take(rows) for name, selection in self.columns.items()}
        return BufferedRows(self.lengths[rows], self.prompts[rows], self.iterations[rows], columns)

    def retain(self, rows: Any) -> BufferedRows:
        """Return some of the rows; where there are none, no chunk of a column is held on to."""
        return self.take(rows) if len(rows) else BufferedRows()

    def groups(self, iteration: int) -> list[Group]:
        """Return its groups: rows that follow one another and are of one prompt."""
        starts = np.flatnonzero(np.diff(self.prompts, prepend=-1))
        groups = []
        for start, end in pairwise([*starts.tolist(), len(self)]):
            age = iteration - int(self.iterations[start])
            tokens = int(self.lengths[start:end].sum())
            groups.append(Group(int(self.prompts[start]), age, end - start, tokens))
        return groups

    def gathering(self, columns: Sequence[str]) -> Arguments:
        """Return arguments and chunks by which ``Worker.repartition`` joins all rows of some columns."""
        return gathering([self.columns[name] for name in columns])

    def record(self) -> dict[str, list[Any]]:
        """Return JSON values: the columns by their names alone."""
        return {
            "lengths": self.lengths.tolist(),
            "prompts": self.prompts.tolist(),
            "made": self.iterations.tolist(),
            "columns": [*self.columns],
        }

    @staticmethod
    def recorded(record: Mapping[str, Sequence[Any]], references: Sequence[Any]) -> BufferedRows:
        """Restore a ``record``; each reference is of one column, whose only chunk has the rows in order."""
        rows = len(record["lengths"])
        columns = {}
        for name, reference in zip(record["columns"], references, strict=True):
            columns[name] = Selection((ColumnRef(name, reference),), (rows,), np.arange(rows))
        return BufferedRows(
            lengths=np.array(record["lengths"], np.int64),
            prompts=np.array(record["prompts"], np.int64),
            iterations=np.array(record["made"], np.int64),
            columns=columns,
        )


def joined(buffers: Sequence[BufferedRows]) -> BufferedRows:
    """Return the rows of several buffers, one after the other."""
    filled = [buffered for buffered in buffers if len(buffered)]  # an empty one has no columns
    if not filled:
        return buffers[0]
    if len(filled) == 1:
        return filled[0]
    columns = {}
    for name in filled[0].columns:
        columns[name] = end_to_end([buffered.columns[name] for buffered in filled])
    return BufferedRows(
        lengths=np.concatenate([buffered.lengths for buffered in filled]),
        prompts=np.concatenate([buffered.prompts for buffered in filled]),
        iterations=np.concatenate([buffered.iterations for buffered in filled]),
        columns=columns,
    )


@dataclass(frozen=True)
class Waiting:
    """Rows that a region leaves for the next iteration: those that stayed, and unfinished groups."""

    rows: BufferedRows = BufferedRows()  # that a filter kept
    prompts: BufferedRows = BufferedRows()  # of unfinished groups, one row per prompt: the source's columns
    samples: BufferedRows = BufferedRows()  # of unfinished groups: what each sample has so far

    def of_groups(self, is_wanted: Any) -> Waiting:
        """Return some of the unfinished groups, by bool ``[groups]``."""
        if is_wanted.all():
            return self
        is_sample_wanted = np.isin(self.samples.prompts, self.prompts.prompts[is_wanted])
        return Waiting(
            prompts=self.prompts.retain(np.flatnonzero(is_wanted)),
            samples=self.samples.retain(np.flatnonzero(is_sample_wanted)),
        )

    def non_empty(self) -> dict[str, BufferedRows]:
        """Return the buffers that have rows, by the names of their fields."""
        buffers = {"rows": self.rows, "prompts": self.prompts, "samples": self.samples}
        return {name: buffered for name, buffered in buffers.items() if len(buffered)}


def together(groups: Sequence[Waiting]) -> Waiting:
    """Return the unfinished groups of several, one after the other."""
    prompts = joined([waiting.prompts for waiting in groups])
    samples = joined([waiting.samples for waiting in groups])
    return Waiting(prompts=prompts, samples=samples)
