"""Decide which engines leave their devices, and when: the fewest moves with which every step fits.

An item (rlgraph/memory.py) is needed by some of a pool's steps. Between two of them is a gap, in which it may
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from rlgraph.memory import Footprint, Item, away_items
from rlgraph.numbering import renumbered, surrounded, with_order
from rlgraph.plan import Plan, Step
from rlgraph.units import size_text

TRIES = 20_000  # branches looked at before the best set found so far is taken
KINDS = {"train": ("offload", "load"), "serve": ("sleep", "wake")}
Around = dict[int, tuple[list[Step], list[Step]]]  # step -> what goes before it and behind it


@dataclass(frozen=True)
class Gap:
    """Positions, within a pool's steps, at which an item is not needed."""

    item: Item
    size: int  # bytes of a device
    inside: tuple[int, ...]
    leaves: int | None  # it goes behind this step, -1 before the first; None: it is away already
    returns: int | None  # it comes back before this step, or behind the last; None: it stays away

    @property
    def around(self) -> bool:
        """Whether it reaches around the end of an iteration."""
        return self.leaves is None or self.returns is None or self.leaves >= self.returns


def reside(footprint: Footprint) -> Plan:
    """The plan with the fewest loads, offloads, wakes and sleeps with which it fits.

    Where none fits, with all that help; ``Footprint.peaks`` then tells by how much it does not.
    """
    plan = footprint.plan
    order = footprint.in_order()
    gaps = {pool: _over_iterations(footprint, pool, order) for pool in plan.pools}
    away: dict[str, tuple[str, ...]] = {}
    for gap in [gap for found in gaps.values() for gap in found if gap.around]:
        engine = f"{gap.item.model}.{gap.item.engine}"
        away[engine] = (*away.get(engine, ()), gap.item.part)
    around = _moves(footprint, order, gaps)
    if around:
        steps, slot = surrounded(plan.steps, around), surrounded(order, around)
        plan = with_order(plan, steps, [step.id for step in slot])
    return _evaluated(replace(footprint, plan=replace(plan, away=away)))


def _over_iterations(footprint: Footprint, pool: str, order: Sequence[Step]) -> list[Gap]:
    """The gaps of a pool's items in the training steps, one iteration after the other, that are taken."""
    steps = footprint.on(pool, order)
    gaps = []
    for item, size in footprint.items(pool).items():
        uses = _uses(footprint, pool, item, steps)
        for left, right in zip(uses, (*uses[1:], *uses[:1]), strict=True):
            span = (right - left - 1) % len(steps) if len(uses) > 1 else len(steps) - 1
            inside = tuple((left + 1 + n) % len(steps) for n in range(span))
            gaps.append(Gap(item, size, inside, left, right))
        if not uses:
            gaps.append(Gap(item, size, tuple(range(len(steps))), None, None))
    return _fewest(footprint, pool, steps, [gap for gap in gaps if _possible(gap, steps)])


def _evaluated(footprint: Footprint) -> Plan:
    """The moves of an evaluation: it starts from the state between two iterations, and returns to it."""
    plan = footprint.plan
    gaps = {pool: _in_evaluation(footprint, pool) for pool in plan.pools}
    around = _moves(footprint, plan.eval_steps, gaps)
    steps, _ = renumbered(surrounded(plan.eval_steps, around), plan.report.values())
    return replace(plan, eval_steps=steps) if around else plan


def _in_evaluation(footprint: Footprint, pool: str) -> list[Gap]:
    plan = footprint.plan
    steps, away = footprint.on(pool, plan.eval_steps), {*away_items(plan)}
    gaps: list[Gap] = []
    given: list[Gap] = []
    for item, size in footprint.items(pool).items():
        uses = _uses(footprint, pool, item, steps)
        for left, right in zip((-1, *uses), (*uses, len(steps)), strict=True):
            gap = Gap(item, size, tuple(range(left + 1, right)), left, right)
            first, last = left == -1 and item in away, right == len(steps) and item in away
            if first or last:  # it is away then, whether that helps or not
                given.append(replace(gap, leaves=None if first else left, returns=None if last else right))
            elif _possible(gap, steps):
                gaps.append(gap)
    return given + _fewest(footprint, pool, steps, gaps, given)


def _uses(footprint: Footprint, pool: str, item: Item, steps: Sequence[Step]) -> list[int]:
    return [at for at, step in enumerate(steps) if item in footprint.needs(pool, step)]


def _possible(gap: Gap, steps: Sequence[Step]) -> bool:
    """Whether it is one at all. Weights that a serve engine drops come back only by a sync."""
    if gap.item.part == "weights" and gap.returns is not None:
        return bool(gap.inside) and gap.returns < len(steps) and steps[gap.returns].kind == "sync"
    return bool(gap.inside)


def _fewest(
    footprint: Footprint, pool: str, steps: Sequence[Step], gaps: Sequence[Gap], given: Sequence[Gap] = ()
) -> list[Gap]:
    """The cheapest set of gaps with which, beside the given ones, every step fits; else all that help."""
    free = int(footprint.cluster.memory) - footprint.resident(pool, set()).total()
    room = [free - footprint.transient(pool, step).total() for step in steps]
    for gap in given:
        _widen(room, gap)
    search = _Search(sorted(gaps, key=lambda gap: -gap.size))
    search.down((), frozenset(), room)
    if search.best is not None:
        return list(search.best)
    short = {at for at, left in enumerate(room) if left < 0}
    return [gap for gap in gaps if short & {*gap.inside}]


def _widen(room: list[int], gap: Gap) -> None:
    for at in gap.inside:
        room[at] += gap.size


class _Search:
    """Branch and bound over sets of gaps: make room where it is shortest, by each gap that helps there."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps, self.tries = gaps, count()
        self.best: tuple[Gap, ...] | None = None
        self.cost = (len(gaps) + 1, 0)

    def down(self, chosen: tuple[Gap, ...], without: frozenset[Gap], room: Sequence[int]) -> None:
        """Try the sets that hold ``chosen`` and nothing of ``without``."""
        cost = (len(chosen), sum(gap.size for gap in chosen))
        if cost >= self.cost or next(self.tries) > TRIES:
            return
        shortest = min(range(len(room)), key=room.__getitem__, default=-1)
        if shortest < 0 or room[shortest] >= 0:
            self.best, self.cost = chosen, cost
            return
        for gap in self.gaps:
            if shortest in gap.inside and gap not in without and gap not in chosen:
                more = list(room)
                _widen(more, gap)
                self.down((*chosen, gap), without, more)
                without |= {gap}


def _moves(footprint: Footprint, order: Sequence[Step], gaps: Mapping[str, Sequence[Gap]]) -> Around:
    """The moves that gaps ask for: one step for all parts of an engine that go the same way."""
    around: Around = {}
    numbers = count(max((step.id for step in order), default=0) + 1)
    for pool, found in gaps.items():
        steps = footprint.on(pool, order)
        for gap in found:
            leaves, returns = KINDS[gap.item.engine]
            if gap.leaves is not None:
                anchor, side = (steps[gap.leaves], 1) if gap.leaves >= 0 else (steps[0], 0)
                why = _needs_room(footprint, pool, gap, steps)
                _join(around, anchor, side, _move(leaves, pool, footprint, gap.item, why), numbers)
            if gap.returns is not None:
                last = gap.returns == len(steps)
                anchor, side = (steps[-1], 1) if last else (steps[gap.returns], 0)
                why = "so it is between two iterations" if last else f"`{anchor.node}` needs them"
                _join(around, anchor, side, _move(returns, pool, footprint, gap.item, why), numbers)
    return around


def _needs_room(footprint: Footprint, pool: str, gap: Gap, steps: Sequence[Step]) -> str:
    """The step of a gap that wants most room, and what it would take."""
    sums = {at: footprint.transient(pool, steps[at]).total() for at in gap.inside}
    at = max(sums, key=sums.__getitem__)
    whole = sums[at] + footprint.resident(pool, set()).total()
    room = size_text(footprint.cluster.memory)
    return f"with all engines on the device `{steps[at].node}` would take {size_text(whole)} of {room}"


def _move(kind: str, pool: str, footprint: Footprint, item: Item, because: str) -> Step:
    return Step(
        id=0,
        phase="",
        kind=kind,
        node="",
        pool=pool,
        devices=tuple(range(footprint.plan.pools[pool])),
        reads=(),
        writes=(),
        frees=(),
        models={item.model: ""},
        layout="",
        inserted=True,
        because=because,
        after=(),
        engine=item.engine,
        parts=(item.part,),
    )


def _join(around: Around, anchor: Step, side: int, move: Step, numbers: count[int]) -> None:
    """Put a move before or behind a step, together with one of the same engine that is there already."""
    row = around.setdefault(anchor.id, ([], []))[side]
    for at, other in enumerate(row):
        if (other.kind, other.models, other.pool) == (move.kind, move.models, move.pool):
            row[at] = replace(other, parts=(*other.parts, *move.parts))
            return
    (model,) = move.models
    where = ("before", "after")[side]
    row.append(
        replace(
            move,
            id=next(numbers),
            phase=anchor.phase,
            node=f"{move.kind}:{model}:{where}:{anchor.node}",
            after=(anchor.id,) if side else (),
            lead=anchor.lead,
        )
    )
    # what leaves makes room for what comes
    row.sort(key=lambda step: step.kind not in ("offload", "sleep"))
