"""``rlgraph plan --autoplace``: the best layout of a graph on its cluster, and what streaming would gain."""

from __future__ import annotations

from collections.abc import Sequence

from rlgraph.compiler import Compilation
from rlgraph.planning.predict import Scenario
from rlgraph.request import PlanRequest
from rlgraph.search.candidate import Candidate
from rlgraph.search.evaluate import Evaluator
from rlgraph.search.faster import streaming_offer
from rlgraph.search.layout_search import ReportProgress, best_layouts, silent
from rlgraph.syntax.yaml_text import overrides


def autoplace(request: PlanRequest, report: ReportProgress = silent) -> tuple[list[Candidate], Compilation]:
    """Return all layouts of a graph on its target that were tried, the best first, and the compilation of the
    best. ``report`` is told after each layout how far the search is.

    Raises:
        GraphError: the graph is wrong, or no layout fits: then as the graph says it.
    """
    candidates = best_layouts(evaluator(request), report)
    best = candidates[0]
    settings = best.settings if best.fits else {}  # the graph as it is, which is refused
    compilation = Compilation(request.with_overrides(*overrides(settings)))
    assert compilation.plan.predicted  # here, so that the refusal of a graph comes from the search
    return candidates, compilation


def offer(request: PlanRequest, layouts: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest plan that streams where it is faster than the best of a search, else None."""
    return streaming_offer(evaluator(request), layouts)


def evaluator(request: PlanRequest) -> Evaluator:
    """Return what plans and predicts a graph with other settings on its target."""
    assert request.target
    return Compilation(request).evaluator(Scenario.of(request.target))
