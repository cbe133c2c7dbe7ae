"""The rules of streaming: in whatever order groups finish, nothing stands still, gets old or is lost."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.ir.graph import Region
from rlgraph.streaming.ledger import GroupLedger
from rlgraph.streaming.rules import Window

LAST = 6  # iterations of a run
PATIENCE = 40  # groups that a filter may drop before it keeps all

whole_groups = st.builds(
    lambda group, groups, **settings: Window(rows=group * groups, group=group, **settings),
    group=st.integers(1, 4),
    groups=st.integers(1, 5),
    staleness=st.integers(0, 3),
    order=st.sampled_from(["fifo", "in_order", "policy.py:any"]),
    too_old=st.sampled_from(["wait", "drop", "correct"]),
    in_flight=st.none() | st.integers(1, 6),
)
# rows of a filter that keeps parts of groups, or of an iteration that no whole groups make up
cut_groups = st.builds(
    Window,
    rows=st.integers(1, 13),
    group=st.integers(1, 5),
    staleness=st.integers(0, 3),
    order=st.sampled_from(["fifo", "in_order"]),
    too_old=st.sampled_from(["wait", "drop", "correct"]),
    in_flight=st.none() | st.integers(1, 6),
)


class Played:
    """A run in which chance says who finishes next, when weights come, and what the filter keeps.

    Every so manyth group is a straggler: it finishes once nothing else may happen.
    """

    def __init__(self, window: Window, data: st.DataObject, cuts: bool) -> None:
        self.window, self.data, self.cuts = window, data, cuts
        self.ledger = GroupLedger(window, end=LAST)
        self.kept, self.used = Counter[int](), Counter[int]()
        self.taken = list[int]()
        self.measured: list[int] = []  # groups that are drawn and wait for their rewards
        self.given_up = 0
        self.straggler = data.draw(st.integers(2, 7), label="straggler")
        # the simulator drops what is old at once, a run when it looks for rows and when a round ends
        self.drops_at_once = data.draw(st.booleans(), label="drops at once")

    def play(self) -> None:
        """Go on until every iteration has its rows; that this ends is what is shown."""
        for tick in count():
            events = self.events()
            assert events, f"iteration {self.ledger.next_iteration} waits, and nothing is in flight"
            assert tick < 5000
            kinds = {kind for kind, _ in events}
            quick = [event for event in events if event[0] == "sync" or event[1] % self.straggler]
            chances = [("take", 0)] if "take" in kinds else quick or events
            kind, number = self.data.draw(st.sampled_from(chances), label="event")
            if kind == "drawn":
                self.ledger.finish_drawing([number])
                self.measured.append(number)
            elif kind == "kept":
                self.keep(number)
            elif kind == "sync":
                self.ledger.weights += 1
            else:
                self.take()
            if self.drops_at_once:
                self.ledger.drop_old()
            if self.drops_at_once or kind == "drawn":
                self.give_up_old()
            self.check()
            if self.ledger.next_iteration == LAST:
                return

    def give_up_old(self) -> None:
        old = self.ledger.old_groups(self.ledger.next_iteration, self.ledger.drawing)
        self.ledger.give_up(old)
        self.given_up += len(old)

    def events(self) -> list[tuple[str, int]]:
        """What may happen next; weights come when the iteration before has its rows, and in order late."""
        ledger = self.ledger
        waits = ledger.weights == ledger.next_iteration
        if waits:
            ledger.drop_old()
        ledger.begin_groups()
        events = [("drawn", number) for number in ledger.drawing]
        events += [("kept", number) for number in self.measured]
        if not waits and ledger.may_change_weights():
            events.append(("sync", 0))
        if waits and deepcopy(ledger).take() is not None:
            events.append(("take", 0))
        return events

    def keep(self, number: int) -> None:
        self.measured.remove(number)
        is_patient = sum(self.kept.values()) + PATIENCE > self.ledger.next_prompt
        limits = [0 if is_patient else self.window.group, self.window.group]
        self.kept[number] = self.data.draw(st.integers(*limits) if self.cuts else st.sampled_from(limits))
        self.ledger.add_rows([number], [number] * self.kept[number])

    def take(self) -> None:
        ledger, iteration = self.ledger, self.ledger.next_iteration
        prompts, begun = ledger.row_prompts, ledger.row_weights
        places = ledger.take()
        assert places is not None and len(places) == self.window.rows
        if self.window.too_old != "correct":
            assert all(iteration - begun[place] <= self.window.staleness for place in places)
        self.used.update(prompts[place] for place in places)
        self.taken += [prompts[place] for place in places]

    def check(self) -> None:
        """Every row is used once, dropped, or waits; what is begun is bounded."""
        ledger, window = self.ledger, self.window
        waiting = Counter(ledger.row_prompts)
        lost = sum((self.kept - self.used - waiting).values())
        assert not self.used + waiting - self.kept, "a row is used twice"
        assert lost + self.given_up * window.group == ledger.dropped_rows
        assert {*ledger.drawing, *self.measured} == {*ledger.in_flight}
        unused = len(ledger.row_weights) + len(ledger.in_flight) * window.group
        assert unused < (window.staleness + 1) * window.rows + window.group
        assert window.in_flight is None or len(ledger.drawing) <= window.in_flight


@given(whole_groups, st.data())
def test_any_order_of_finishing_goes_on(window: Window, data: st.DataObject) -> None:
    run = Played(window, data, cuts=False)
    run.play()
    if window.too_old == "wait":
        assert run.ledger.dropped_rows == 0
    if window.order == "in_order" and window.too_old != "drop":
        assert run.taken == sorted(run.taken)


@given(cut_groups, st.data())
def test_filters_that_cut_groups_starve_nothing(window: Window, data: st.DataObject) -> None:
    Played(window, data, cuts=True).play()


def test_what_would_be_too_late_comes_first() -> None:
    window = Window(rows=4, group=1, staleness=1)
    assert window.choose(7, [7, 7, 7, 7, 6], range(5), {}) == [0, 1, 2, 4]
    assert window.choose(7, [7, 7, 7, 7], range(4), {9: 6}) is None  # that one is waited for
    assert window.choose(7, [7] * 4, range(4), dict.fromkeys(range(4, 8), 7)) == [0, 1, 2, 3]
    # nine of 7 are more than iteration 8 takes: one of them has to come now, and none does
    assert window.choose(7, [6, 6, 6, 6], range(4), dict.fromkeys(range(4, 9), 7)) == [0, 1, 2, 3]


@pytest.mark.parametrize("too_old", ["drop", "correct"])
def test_no_iteration_waits_for_what_is_old(too_old: str) -> None:
    window = Window(rows=2, group=1, staleness=0, too_old=too_old)
    assert window.choose(7, [7, 7], [4, 5], {1: 6}) == [0, 1]
    assert window.is_young(6, 7) == (too_old == "correct")


def test_a_policy_orders_what_need_not_come() -> None:
    window = Window(rows=3, group=1, staleness=1, order="mine.py:latest")
    assert window.choose(7, [7, 7, 7, 6], range(4), {}, lambda places: places[::-1]) == [1, 2, 3]


def test_in_order_waits_for_the_prompt_before() -> None:
    window = Window(rows=2, group=1, staleness=1, order="in_order")
    assert window.choose(0, [0, 0, 0], [3, 1, 2], {0: 0}) is None
    assert window.choose(0, [0, 0, 0], [3, 1, 2], {4: 0}) == [1, 2]


def test_what_is_old_is_dropped_and_given_up() -> None:
    ledger = GroupLedger(Window(rows=2, group=2, staleness=0, too_old="drop"))
    ledger.begin(3)
    ledger.finish_drawing([0, 1])
    ledger.add_rows([0], [0, 0])
    assert ledger.take() == [0, 1]
    ledger.add_rows([1], [1, 1])
    assert ledger.drop_old() == [] and ledger.row_prompts == []
    assert ledger.old_groups(1, ledger.drawing) == [2]
    ledger.give_up([2])
    assert (ledger.in_flight, ledger.drawing, ledger.dropped_rows) == ({}, {}, 4)


def test_a_refill_asks_for_what_is_missing_by_what_the_filter_kept() -> None:
    region = Region("mixed", "prompts", "prompts", 64, 8, 10, 1.0, 1.0, 0)
    ledger = GroupLedger(Window.of_refill(region))
    first = ledger.begin_groups()
    assert first == range(8)
    ledger.finish_drawing(first)
    ledger.add_rows(first, [0] * 8 + [3] * 8)
    ledger.count_filtered(64, 16)
    assert ledger.room() == region.rows_to_request(48, 64, 16)
    ledger.begin(1)
    assert ledger.room() == region.rows_to_request(48, 64, 16) - 1  # what an earlier round has begun goes on


def test_a_source_may_give_other_groups_than_it_was_asked_for() -> None:
    region = Region("mixed", "prompts", "prompts", 64, 8, 10, 1.0, 1.0, 0)
    ledger = GroupLedger(Window.of_refill(region))
    ledger.correct_count(ledger.begin(8), 5)
    assert ledger.next_prompt == 5 and [*ledger.in_flight] == [*range(5)]
