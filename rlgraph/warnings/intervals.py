"""Finds intervals that are longer than the run: what has them comes only where every run has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlgraph.errors import Problem
from rlgraph.frontend.shipped import graphs_folder
from rlgraph.frontend.tree_paths import find
from rlgraph.ir.plan import Plan
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.source import Tree

SAVE, RECORD, EVALUATE = ("schedule", "save_every"), ("schedule", "record_every"), ("eval", "every")
# the path of an interval -> what is left of it where it is longer than the run
LEFT = {
    SAVE: "checkpoints come only at the end",
    RECORD: "only the first iteration is recorded",
    EVALUATE: "evaluations come only at its ends",
}


def intervals(plan: Plan) -> dict[tuple[str, str], int | Interval]:
    """Return a plan's intervals by their paths, without those that are 0."""
    every = {SAVE: plan.schedule.save_every, RECORD: plan.schedule.record_every, EVALUATE: plan.eval_every}
    return {path: interval for path, interval in every.items() if interval}


def long_intervals(plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield intervals that are longer than the run, in iterations both, or in epochs of one source."""
    epochs = plan.schedule.epochs if isinstance(plan.schedule.epochs, dict) else {}
    for path, every in intervals(plan).items():
        if isinstance(every, int) and every > plan.iterations > 0:
            yield from longer_than_the_run(plan, tree, path, f"{plan.iterations:,} iterations")
        elif isinstance(every, Interval) and every.epochs > epochs.get(every.source, float("inf")):
            length = f"{epochs[every.source]:g} epochs of {every.source}"
            yield from longer_than_the_run(plan, tree, path, length)


def longer_than_the_run(plan: Plan, tree: Tree, path: tuple[str, str], length: str) -> Iterator[Problem]:
    """Yield the warning of an interval that is longer than the run, which has such a length; none where a
    shipped graph has the interval, whose run another has made shorter."""
    place, name = find(tree, path), ".".join(path)
    if place is None or Path(place.mark.source.name).parent == graphs_folder():
        return
    law = f"`{name}` is {intervals(plan)[path]}, and the run has {length}: {LEFT[path]}"
    remedy = f"give less, or set: {{{name}: 0}}"
    yield Problem("long-interval", law, place.mark, (), remedy, grade="warning")


def best_of_one(plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield a best checkpoint that is chosen among one, as no evaluation comes on the way."""
    if plan.schedule.best and plan.eval_steps and not plan.eval_every:
        law = "`schedule.best` chooses among checkpoints by their evaluations, and there is only that after "
        law += "the last iteration (`eval.every` is 0)"
        mark = tree.at(("schedule", "best")).key
        yield Problem("best-of-one", law, mark, (), "set: {eval.every: 20}, or another interval")
