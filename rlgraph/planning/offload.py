"""Decide which engines leave their devices, and when: the fewest moves with which every step fits.

An item (costs/memory.py) is needed by some of a pool's steps. Between two of them is a gap, in which it may
be away:

    step         sync   rollout   logprobs   update   (and from the start)
    parameters    x        .          x         x       one gap: the rollout
    optimizer     .        .          .         x       one gap: from the update around to the next
    served        x        x          .         .       one gap: from the rollout around to the next sync

Iterations follow one another, so gaps reach around their end, and the state between two iterations is the
same every time. Of all sets of gaps with which every step fits, the one with the fewest is taken, and of
those the one that moves the fewest bytes (branch and bound). Roomy devices get none.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Literal

from rlgraph.costs.memory import EngineComponent, Footprint, away_items
from rlgraph.ir.actions import Collect, MoveEngine, Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.renumber import renumbered, surrounded, with_order
from rlgraph.ir.steps import NONE
from rlgraph.units import size_text

TRIES = 20_000  # branches that are looked at, about a second; then the best set so far is taken, with a note
BETWEEN = "so it is between two iterations"
IN_FRONT, BEHIND = 0, 1  # sides of a step, as places in MovesAround
MovesAround = dict[int, tuple[list[Step], list[Step]]]  # step -> the moves before it and behind it


@dataclass(frozen=True)
class Gap:
    """Positions, within a pool's steps, at which an item is not needed."""

    item: EngineComponent
    size: int  # bytes of a device
    inside: tuple[int, ...]
    start: int | None  # the item leaves behind this step, -1 before the first; None: it is away already
    end: int | None  # it comes back before this step, or behind the last; None: it stays away

    @property
    def around(self) -> bool:
        """Return whether it reaches around the end of an iteration."""
        if self.start is None or self.end is None:
            return True
        return self.start >= self.end


# gaps that may be taken, and those that are, whether they help or not
Gaps = tuple[list[Gap], list[Gap]]
FindGaps = Callable[[Footprint, str, Sequence[Step]], Gaps]


def reside(footprint: Footprint) -> Plan:
    """Return the plan with the fewest loads, offloads, wakes and sleeps with which it fits.

    Where none fits, with all that help; ``Footprint.peaks`` then tells by how much it does not. A note says
    where fewer might do.
    """
    order = footprint.in_order()
    plan, gaps = _chosen_gaps(footprint, order, _over_iterations)
    off_device: dict[str, tuple[str, ...]] = {}  # engine -> its parts that are away between two iterations
    for pool, gaps_of_pool in gaps.items():
        for gap in gaps_of_pool:
            if gap.around:
                engine = plan.engine_key(gap.item.model, gap.item.engine, pool)
                off_device[engine] = (*off_device.get(engine, ()), gap.item.name)
    around = _moves(footprint, order, gaps)
    if around:
        steps, slot = surrounded(plan.steps, around), surrounded(order, around)
        plan = with_order(plan, steps, [step.id for step in slot])
    return _evaluated(replace(footprint, plan=replace(plan, away=off_device)))


def _chosen_gaps(
    footprint: Footprint, order: Sequence[Step], find: FindGaps
) -> tuple[Plan, dict[str, list[Gap]]]:
    """Return the gaps that each pool takes, and the plan with a note where cheaper ones may do."""
    notes, gaps_of_pool = [], {}
    for pool in footprint.plan.pools:
        steps = footprint.on(pool, order)
        gaps, anyway = find(footprint, pool, steps)
        possible = [gap for gap in gaps if _is_possible(gap, steps)]
        chosen, is_proved = _fewest(footprint, pool, steps, possible, anyway)
        gaps_of_pool[pool] = anyway + chosen
        if not is_proved:
            note = f"pool {pool}: its moves are the best of {TRIES:,} sets that were tried"
            notes.append(f"{note}; fewer or smaller ones may do")
    return replace(footprint.plan, notes=(*footprint.plan.notes, *notes)), gaps_of_pool


def _over_iterations(footprint: Footprint, pool: str, steps: Sequence[Step]) -> Gaps:
    """Return the gaps of a pool's items in the training steps, one iteration after the other."""
    gaps = []
    for item, size in footprint.items(pool).items():
        uses = _uses(footprint, pool, item, steps)
        if not uses:
            gaps.append(Gap(item, size, tuple(range(len(steps))), None, None))
        for place, use in enumerate(uses):
            next_use = uses[(place + 1) % len(uses)]
            span = (next_use - use - 1) % len(steps)
            if len(uses) == 1:
                span = len(steps) - 1  # from a use around to the same one there are all other steps
            inside = tuple((use + 1 + n) % len(steps) for n in range(span))
            gaps.append(Gap(item, size, inside, use, next_use))
    return gaps, []


def _evaluated(footprint: Footprint) -> Plan:
    """Add the moves of an evaluation: it starts from the state between two iterations, and returns to it."""
    plan, gaps = _chosen_gaps(footprint, footprint.plan.eval_steps, _in_evaluation)
    around = _moves(footprint, plan.eval_steps, gaps)
    if not around:
        return plan
    steps, _ = renumbered(surrounded(plan.eval_steps, around), plan.report.values())
    return replace(plan, eval_steps=steps)


def _in_evaluation(footprint: Footprint, pool: str, steps: Sequence[Step]) -> Gaps:
    off_device = {*away_items(footprint.plan, pool)}
    gaps, anyway = list[Gap](), list[Gap]()
    for item, size in footprint.items(pool).items():
        uses = _uses(footprint, pool, item, steps)
        for use, next_use in zip((-1, *uses), (*uses, len(steps)), strict=True):
            gap = Gap(item, size, tuple(range(use + 1, next_use)), use, next_use)
            is_at_end = use == -1 or next_use == len(steps)
            if item not in off_device or not is_at_end:
                gaps.append(gap)
                continue
            # it is away before the evaluation, and has to be away behind it
            if use == -1:
                gap = replace(gap, start=None)
            if next_use == len(steps):
                gap = replace(gap, end=None)
            anyway.append(gap)
    return gaps, anyway


def _uses(footprint: Footprint, pool: str, item: EngineComponent, steps: Sequence[Step]) -> list[int]:
    return [place for place, step in enumerate(steps) if item in footprint.needs(pool, step)]


def _is_possible(gap: Gap, steps: Sequence[Step]) -> bool:
    """Return whether an item can leave for a gap.

    Weights that a serve engine drops come back only by a sync, and those that no sync brings stay, as do
    adapters beside them.
    """
    if not gap.inside or gap.item.name in ("base", "adapters"):
        return False
    if gap.item.name != "weights" or gap.end is None:
        return True
    if gap.end == len(steps):
        return False
    return isinstance(steps[gap.end].action, Sync)


def _fewest(
    footprint: Footprint, pool: str, steps: Sequence[Step], gaps: Sequence[Gap], anyway: Sequence[Gap]
) -> tuple[list[Gap], bool]:
    """Return the cheapest set of gaps with which, beside ``anyway``, every step fits; else all that help.

    With it, whether no cheaper one does.
    """
    free = footprint.cluster.usable - footprint.resident(pool, set()).total()
    room = [free - footprint.transient(pool, step).total() for step in steps]
    for gap in anyway:
        room = _widened(room, gap)
    search = _Search(sorted(gaps, key=lambda gap: -gap.size))
    search.down((), frozenset(), room)
    is_proved = search.tries <= TRIES
    if search.best is not None:
        return [*search.best], is_proved
    short = {place for place, free_bytes in enumerate(room) if free_bytes < 0}
    return [gap for gap in gaps if short & {*gap.inside}], is_proved


def _widened(room: Sequence[int], gap: Gap) -> list[int]:
    wider = [*room]
    for place in gap.inside:
        wider[place] += gap.size
    return wider


class _Search:
    """Branch and bound over sets of gaps: make room where it is shortest, by each gap that helps there.

    A branch ends where no set in it can be cheaper than the best so far: at each step that is short of room,
    the largest gaps that are left say how many more it takes at least, and the shortage how many bytes.

    Invariants:
        - ``best`` is the cheapest set so far with which every step fits, and ``cost`` what it costs: gaps,
          and of equally many the bytes that they move. None and infinity before there is one.
        - No branch is looked at twice: a gap that was tried at a step is left out of the branches behind it.
    """

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps = gaps  # the largest first
        self.best: tuple[Gap, ...] | None = None
        self.cost: tuple[float, int] = (math.inf, 0)
        self.tries = 0

    def down(self, chosen: tuple[Gap, ...], without: frozenset[Gap], room: Sequence[int]) -> None:
        """Try the sets that hold ``chosen`` and nothing of ``without``."""
        lacking = {place: -free for place, free in enumerate(room) if free < 0}
        candidates = [gap for gap in self.gaps if gap not in without and gap not in chosen]
        more: float = 0  # gaps, at least
        for place, lacking_bytes in lacking.items():
            sizes = [gap.size for gap in candidates if place in gap.inside]
            more = max(more, _least(sizes, lacking_bytes))
        chosen_bytes = sum(gap.size for gap in chosen)
        more_bytes = max(lacking.values(), default=0)
        cost = len(chosen) + more, chosen_bytes + more_bytes
        if cost >= self.cost:
            return
        self.tries += 1
        if self.tries > TRIES:
            return
        if not lacking:
            self.best, self.cost = chosen, cost
            return
        tightest = min(lacking, key=lambda place: (room[place], place))
        for gap in candidates:
            if tightest in gap.inside:
                self.down((*chosen, gap), without, _widened(room, gap))
                without |= {gap}


def _least(sizes: Sequence[int], lacking: int) -> float:
    """Return how many of these sizes, largest first, add up to what is lacking; infinity if all do not."""
    sums = list(accumulate(sizes))
    if not sums or sums[-1] < lacking:
        return math.inf
    return 1 + bisect_left(sums, lacking)


def _moves(footprint: Footprint, order: Sequence[Step], gaps: Mapping[str, Sequence[Gap]]) -> MovesAround:
    """Return the moves that gaps ask for: one step for all parts of an engine that go the same way."""
    around: MovesAround = {}
    numbers = count(max((step.id for step in order), default=0) + 1)
    for pool, gaps_of_pool in gaps.items():
        steps = footprint.on(pool, order)
        for gap in gaps_of_pool:
            if gap.start is not None:
                reason = _needs_room(footprint, pool, gap, steps)
                move = _move("off", pool, footprint, gap.item, reason)
                if gap.start >= 0:
                    _join(around, steps[gap.start], BEHIND, move, numbers)
                else:
                    _join(around, steps[0], IN_FRONT, move, numbers)
            if gap.end == len(steps):
                move = _move("back", pool, footprint, gap.item, BETWEEN)
                _join(around, steps[-1], BEHIND, move, numbers)
            elif gap.end is not None:
                anchor = steps[gap.end]
                # it may be brought back earlier than it is used, where there is room
                uses = _uses(footprint, pool, gap.item, steps)
                user = steps[next((place for place in uses if place >= gap.end), gap.end)]
                reason = f"`{_user(user, order)}` needs them"
                move = _move("back", pool, footprint, gap.item, reason)
                _join(around, anchor, IN_FRONT, move, numbers)
    return around


def _user(step: Step, order: Sequence[Step]) -> str:
    """Return the node that a step needs an engine for: a collect of a pool that is lent draws samples."""
    if not isinstance(step.action, Collect):
        return step.node
    drawing = [candidate for candidate in order if candidate.unfinished]
    return drawing[0].node if drawing else step.node


def _needs_room(footprint: Footprint, pool: str, gap: Gap, steps: Sequence[Step]) -> str:
    """Return the step of a gap that needs most room, and what it would take."""
    sums = {place: footprint.transient(pool, steps[place]).total() for place in gap.inside}
    largest = max(sums, key=sums.__getitem__)
    total = sums[largest] + footprint.resident(pool, set()).total()
    if total <= footprint.cluster.usable:
        return BETWEEN
    room = size_text(footprint.cluster.usable)
    return f"with all engines on the device `{steps[largest].node}` would take {size_text(total)} of {room}"


def _move(
    direction: Literal["off", "back"], pool: str, footprint: Footprint, item: EngineComponent, because: str
) -> Step:
    return Step(
        id=0,
        phase="",
        node="",
        pool=pool,
        devices=tuple(range(footprint.plan.pools[pool])),
        reads=(),
        writes=(),
        frees=(),
        layout=NONE,
        because=because,
        after=(),
        action=MoveEngine(item.model, item.engine, direction, (item.name,)),
    )


def _join(around: MovesAround, anchor: Step, side: int, move: Step, numbers: count[int]) -> None:
    """Put a move before or behind a step, together with one of the same engine that is there already."""
    action = move.action
    assert isinstance(action, MoveEngine)
    moves = around.setdefault(anchor.id, ([], []))[side]
    for place, present in enumerate(moves):
        present_action = present.action
        assert isinstance(present_action, MoveEngine)
        same_engine = replace(present_action, parts=action.parts) == action
        if same_engine and present.pool == move.pool:
            joined = replace(present_action, parts=(*present_action.parts, *action.parts))
            moves[place] = replace(present, action=joined)
            return
    side_name = "before"
    needs: tuple[int, ...] = ()
    if side == BEHIND:
        side_name, needs = "after", (anchor.id,)
    moves.append(
        replace(
            move,
            id=next(numbers),
            phase=anchor.phase,
            node=f"{action.kind}:{action.model}:{side_name}:{anchor.node}",
            after=needs,
            lead=anchor.lead,
        )
    )
    # what leaves makes room for what comes
    moves.sort(key=_comes_back)


def _comes_back(move: Step) -> bool:
    return isinstance(move.action, MoveEngine) and move.action.direction == "back"
