"""The account of a region's groups, which the simulator of plans and the driver of runs both keep.

    begin ──> drawing ──> in flight, being measured ──> waiting in the buffer ──> taken by an iteration
                 └───────────── give_up ─────────────────────── drop_old

A group is a prompt with its samples. The ledger knows numbers alone: no columns, no seconds, no devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlgraph.streaming.rules import Arrange, Window


@dataclass
class GroupLedger:
    """The groups of a region that have begun, the rows that wait, and the events that may come next.

    Invariants:
        - A prompt is begun once: its number is below ``next_prompt``, and numbers are given in order.
        - ``drawing`` is a part of ``in_flight``; a group leaves both before its rows wait or are dropped.
        - ``row_prompts`` and ``row_weights`` have one entry per row in the buffer, in the order of arrival.
        - No iteration takes rows before ``next_iteration - 1`` has taken its own.
        - A stream has fewer than (staleness + 1) x rows + one group of rows begun and not used.

    Example:
        >>> ledger = GroupLedger(Window(rows=4, group=2, staleness=0))
        >>> [*ledger.begin_groups()], ledger.room(), ledger.take()
        ([0, 1], 0, None)
        >>> ledger.finish_drawing([0, 1])
        >>> ledger.add_rows([1], [1, 1])
        >>> ledger.add_rows([0], [0, 0])
        >>> ledger.take()
        [0, 1, 2, 3]
    """

    window: Window
    end: float = math.inf  # the number of iterations of the run
    next_prompt: int = 0
    row_weights: list[int] = field(default_factory=list)  # per row in the buffer: their iteration
    row_prompts: list[int] = field(default_factory=list)  # per row in the buffer
    in_flight: dict[int, int] = field(default_factory=dict)  # prompt -> the iteration of its weights
    drawing: dict[int, int] = field(default_factory=dict)  # the same of groups with unfinished samples
    weights: int = 0  # the iteration whose weights generate
    next_iteration: int = 0  # the one that takes rows next
    dropped_rows: int = 0
    seen_rows: int = 0  # by the filter, since an iteration took rows
    stayed_rows: int = 0  # those of them that it kept

    def room(self) -> int:
        """Return how many more groups may begin."""
        if self.window.refill:
            return self.window.round_size(
                len(self.row_weights), len(self.drawing), self.seen_rows, self.stayed_rows
            )
        usable_by = int(min(self.weights + 1 + self.window.staleness, self.end))
        return self.window.room(
            usable_by - self.next_iteration, len(self.row_weights), len(self.in_flight), len(self.drawing)
        )

    def begin_groups(self) -> range:
        """Begin as many groups as may begin; return the numbers of their prompts."""
        return self.begin(self.room())

    def begin(self, count: int) -> range:
        """Begin some groups with the current weights; return the numbers of their prompts."""
        numbers = range(self.next_prompt, self.next_prompt + count)
        for number in numbers:
            self.in_flight[number] = self.weights
            self.drawing[number] = self.weights
        self.next_prompt += count
        return numbers

    def correct_count(self, requested: range, returned: int) -> None:
        """Note how many groups a source has given that was asked for others; they are the latest to begin."""
        assert requested.stop == self.next_prompt, "only the latest groups can be corrected"
        for number in requested:
            self.in_flight.pop(number, None)
            self.drawing.pop(number, None)
        self.next_prompt = requested.start
        self.begin(returned)

    def finish_drawing(self, numbers: Iterable[int]) -> None:
        """Note that all samples of some groups are finished; their rewards are to come."""
        for number in numbers:
            del self.drawing[number]

    def add_rows(self, groups: Iterable[int], kept_rows: Sequence[int]) -> None:
        """Put the rows of some groups, whose rewards have come, into the buffer.

        ``kept_rows`` has the number of its prompt for each row that the filter kept, in the order of use.
        """
        self.row_prompts += kept_rows
        self.row_weights += [self.in_flight[number] for number in kept_rows]
        for number in groups:
            del self.in_flight[number]

    def count_filtered(self, seen_rows: int, stayed_rows: int) -> None:
        """Note how many rows the filter saw and kept."""
        self.seen_rows += seen_rows
        self.stayed_rows += stayed_rows

    def take(self, arrange: Arrange = lambda places: places) -> list[int] | None:
        """Take the rows of the next iteration out of the buffer; return the places that they had.

        None while some are missing. ``arrange`` is that of ``Window.choose``.
        """
        window = self.window
        places = window.choose(
            self.next_iteration, self.row_weights, self.row_prompts, self.in_flight, arrange
        )
        if places is None:
            return None
        chosen = set(places)
        self._keep([place for place in range(len(self.row_weights)) if place not in chosen])
        self.next_iteration += 1
        return places

    def forget_filtered(self) -> None:
        """Count what the filter sees and keeps anew, for the next iteration."""
        self.seen_rows = 0
        self.stayed_rows = 0

    def drop_old(self) -> Sequence[int]:
        """Drop rows that are too old for the next iteration; return the places of those that stay."""
        window, iteration = self.window, self.next_iteration
        oldest = min(self.row_weights, default=iteration)
        if window.is_young(oldest, iteration):
            return range(len(self.row_weights))
        young = [
            place for place, weights in enumerate(self.row_weights) if window.is_young(weights, iteration)
        ]
        self.dropped_rows += len(self.row_weights) - len(young)
        self._keep(young)
        return young

    def old_groups(self, iteration: int, among: Iterable[int]) -> list[int]:
        """Return those of some groups in flight that are too old for an iteration."""
        return [n for n in among if not self.window.is_young(self.in_flight[n], iteration)]

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop groups whose samples are not finished."""
        for number in numbers:
            del self.drawing[number]
            del self.in_flight[number]
            self.dropped_rows += self.window.group

    def is_coming(self, measured: Sequence[int]) -> bool:
        """Return whether the next iteration has its rows as soon as the ``measured`` groups arrive."""
        return self.window.is_coming(
            self.next_iteration, self.row_weights, self.row_prompts, self.in_flight, measured
        )

    @property
    def in_order(self) -> bool:
        """Return whether rows are taken in the order of their prompts."""
        return self.window.order == "in_order"

    def may_change_weights(self) -> bool:
        """Return whether new weights may come: in order, only where nothing is in flight or may begin."""
        if not self.in_order:
            return True
        return not self.in_flight and not self.room()

    def reorder(self, places: Sequence[int]) -> None:
        """Put the rows in the buffer in another order; rows whose places are left out leave it."""
        self._keep(places)

    def put_first(self, row_prompts: list[int], row_weights: list[int]) -> None:
        """Put rows into the buffer again, before all others."""
        self.row_prompts = row_prompts + self.row_prompts
        self.row_weights = row_weights + self.row_weights

    def _keep(self, places: Sequence[int]) -> None:
        self.row_weights = [self.row_weights[place] for place in places]
        self.row_prompts = [self.row_prompts[place] for place in places]
