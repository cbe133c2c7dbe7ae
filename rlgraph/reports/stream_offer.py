"""Whether generation that streams would pay on the devices of a search, with the corrections that it needs.

A search leaves alone what changes results, and rows of older weights do; so this is offered, and not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlgraph.errors import GraphError
from rlgraph.ir.plan import Target
from rlgraph.planning.predict import Scenario, predict
from rlgraph.reports.layout_search import Candidate, planner
from rlgraph.reports.whatif import LEAST, streamed
from rlgraph.units import middle

SPLITS = 4  # divisions of the devices that are tried


def offer(graph: str, given: Sequence[str], target: Target, found: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest plan that streams where it is faster than the best of a search, else None.

    Tried are the layouts with generation apart whose busiest pool has the least to do.
    """
    scenario, tried = Scenario.of(target), list[Candidate]()
    planned = planner(graph, given, target, scenario.cluster)
    for candidate in _apart(found):
        assert candidate.plan
        for one in streamed(candidate.plan, candidate.settings):
            try:
                plan = predict(planned(one.settings), scenario, must_fit=False)
            except GraphError:  # its loss has no correction that would do, or a rollout can't stream
                continue
            tried.append(replace(candidate, settings=one.settings, plan=plan, why_not=one.alters))
    fits = [candidate for candidate in tried if candidate.fits]
    best = min(fits, key=lambda candidate: candidate.seconds, default=None)
    return best if best and best.seconds < (1 - LEAST) * found[0].seconds else None


def _apart(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the best layout of each division of the devices, and of those the least busy."""
    divided: dict[int, Candidate] = {}
    for candidate in found:
        plan, layout = candidate.plan, candidate.layout
        if candidate.fits and layout and layout.generating and plan and not plan.schedule.stream:
            divided.setdefault(layout.generating, candidate)
    yield from sorted(divided.values(), key=_busiest)[:SPLITS]


def _busiest(candidate: Candidate) -> float:
    assert candidate.plan and candidate.plan.predicted
    return max(middle(took) for took in candidate.plan.predicted.pools.values())
