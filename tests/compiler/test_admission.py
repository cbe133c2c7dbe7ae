"""The rules of streaming: in whatever order groups finish, nothing stands still, gets old or is lost."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.planning.admission import Admission, Stock

LAST = 6  # iterations of a run
PATIENCE = 40  # groups that a filter may drop before it keeps all

whole_groups = st.builds(
    lambda group, groups, **settings: Admission(rows=group * groups, group=group, **settings),
    group=st.integers(1, 4),
    groups=st.integers(1, 5),
    staleness=st.integers(0, 3),
    order=st.sampled_from(["fifo", "in_order", "policy.py:any"]),
    too_old=st.sampled_from(["wait", "drop", "correct"]),
    in_flight=st.none() | st.integers(1, 6),
)
# rows of a filter that keeps parts of groups, or of an iteration that no whole groups make up
cut_groups = st.builds(
    Admission,
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

    def __init__(self, rules: Admission, data: st.DataObject, cuts: bool) -> None:
        self.rules, self.data, self.cuts = rules, data, cuts
        self.stock, self.kept, self.used, self.taken = (
            Stock(rules),
            Counter[int](),
            Counter[int](),
            list[int](),
        )
        self.measured: list[int] = []  # groups that are drawn and wait for their rewards
        self.given_up, self.straggler = 0, data.draw(st.integers(2, 7), label="straggler")

    def play(self) -> None:
        """Go on until every iteration has its rows; that this ends is what is shown."""
        for tick in count():
            events = self.events()
            assert events, f"iteration {self.stock.given} waits, and nothing is under way"
            assert tick < 5000
            kinds = {kind for kind, _ in events}
            quick = [event for event in events if event[0] == "sync" or event[1] % self.straggler]
            chances = [("take", 0)] if "take" in kinds else quick or events
            kind, number = self.data.draw(st.sampled_from(chances), label="event")
            if kind == "drawn":
                del self.stock.unfinished[number]
                self.measured.append(number)
            elif kind == "kept":
                self.keep(number)
            elif kind == "sync":
                self.stock.now += 1
            else:
                self.take()
            self.given_up += len(self.stock.drop_old())
            self.check()
            if self.stock.given == LAST:
                return

    def events(self) -> list[tuple[str, int]]:
        """What may happen next; weights come when the iteration before has its rows, and in order late."""
        self.stock.begin(LAST)
        events = [("drawn", number) for number in self.stock.unfinished]
        events += [("kept", number) for number in self.measured]
        waits = self.stock.now == self.stock.given
        if not waits and self.stock.may_change(LAST):
            events.append(("sync", 0))
        if waits and deepcopy(self.stock).take() is not None:
            events.append(("take", 0))
        return events

    def keep(self, number: int) -> None:
        self.measured.remove(number)
        least = 0 if sum(self.kept.values()) + PATIENCE > self.stock.position else self.rules.group
        kept = [least, self.rules.group]
        self.kept[number] = self.data.draw(st.integers(*kept) if self.cuts else st.sampled_from(kept))
        self.stock.finish(number, self.kept[number])

    def take(self) -> None:
        iteration = self.stock.given
        taken = self.stock.take()
        assert taken is not None and len(taken) == self.rules.rows
        if self.rules.too_old != "correct":
            assert all(iteration - begun <= self.rules.staleness for _, begun in taken)
        self.used.update(prompt for prompt, _ in taken)
        self.taken += [prompt for prompt, _ in taken]

    def check(self) -> None:
        """Every row is used once, dropped, or waits; what is begun is bounded."""
        stock, rules = self.stock, self.rules
        waiting = Counter(stock.prompts)
        lost = sum((self.kept - self.used - waiting).values())
        assert not self.used + waiting - self.kept, "a row is used twice"
        assert lost + self.given_up * rules.group == stock.dropped
        assert {*stock.unfinished, *self.measured} == {*stock.unused}
        unused = len(stock.begun) + len(stock.unused) * rules.group
        assert unused < (rules.staleness + 1) * rules.rows + rules.group
        assert rules.in_flight is None or len(stock.unfinished) <= rules.in_flight


@given(whole_groups, st.data())
def test_any_order_of_finishing_goes_on(rules: Admission, data: st.DataObject) -> None:
    run = Played(rules, data, cuts=False)
    run.play()
    if rules.too_old == "wait":
        assert run.stock.dropped == 0
    if rules.order == "in_order" and rules.too_old != "drop":
        assert run.taken == sorted(run.taken)


@given(cut_groups, st.data())
def test_filters_that_cut_groups_starve_nothing(rules: Admission, data: st.DataObject) -> None:
    Played(rules, data, cuts=True).play()


def test_what_would_be_too_late_comes_first() -> None:
    rules = Admission(rows=4, group=1, staleness=1)
    assert rules.chosen(7, [7, 7, 7, 7, 6], range(5), {}) == [0, 1, 2, 4]
    assert rules.chosen(7, [7, 7, 7, 7], range(4), {9: 6}) is None  # that one is waited for
    assert rules.chosen(7, [7] * 4, range(4), dict.fromkeys(range(4, 8), 7)) == [0, 1, 2, 3]
    # nine of 7 are more than iteration 8 takes: one of them has to come now, and none does
    assert rules.chosen(7, [6, 6, 6, 6], range(4), dict.fromkeys(range(4, 9), 7)) == [0, 1, 2, 3]


@pytest.mark.parametrize("too_old", ["drop", "correct"])
def test_no_iteration_waits_for_what_is_old(too_old: str) -> None:
    rules = Admission(rows=2, group=1, staleness=0, too_old=too_old)
    assert rules.chosen(7, [7, 7], [4, 5], {1: 6}) == [0, 1]
    assert rules.is_young(6, 7) == (too_old == "correct")


def test_a_policy_orders_what_need_not_come() -> None:
    rules = Admission(rows=3, group=1, staleness=1, order="mine.py:latest")
    assert rules.chosen(7, [7, 7, 7, 6], range(4), {}, lambda places: places[::-1]) == [1, 2, 3]


def test_in_order_waits_for_the_prompt_before() -> None:
    rules = Admission(rows=2, group=1, staleness=1, order="in_order")
    assert rules.chosen(0, [0, 0, 0], [3, 1, 2], {0: 0}) is None
    assert rules.chosen(0, [0, 0, 0], [3, 1, 2], {4: 0}) == [1, 2]
