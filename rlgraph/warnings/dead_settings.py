"""Find dead settings: values that can be changed, or taken out, and the plan stays the same.

Nothing here knows what a setting means. A value that the plan holds is in use: the sections of models,
pools and schedule that it repeats, and what functions are called with. Any other is changed, or taken out,
and the graph planned again:

    models.ref.serve.max_rows: 64 ─┬─> 65      same plan ─┐
                                   ├─> 128     same plan ─┼─> dead
                                   └─> (none)  same plan ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.engines.registry import SERVING
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.edge_edits import TreePath
from rlgraph.frontend.tree_paths import put
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan, ServePlan
from rlgraph.laws.settings import decides_nothing
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import OPEN, Tree

ALL = "all"  # what the plan holds, or may hold, whatever it is


def dead_settings(
    written: Tree, plan: Plan, known: Collection[TreePath], plan_of: Callable[[Tree], Plan]
) -> Iterator[Problem]:
    """Yield a problem for each setting that decides nothing, or for the whole section of such.

    Args:
        written: the graph, with its ``${...}`` still in place.
        plan: its plan.
        known: paths of nodes and models of which a problem says already that nothing uses them.
        plan_of: returns the plan of a composed graph.
    """
    trained, evaluated = (dict(plan.functions.get(phase, {})) for phase in ("train", "eval"))
    held: dict[str, Any] = {"models": plan.models, "nodes": evaluated | trained}
    held |= {"eval": {"nodes": evaluated, "report": plan.report}}
    held["eval"] |= {"every": plan.eval_every, "before": plan.eval_before}
    if any(name.startswith("models.") for name in plan.open_values):
        held["models"] = ALL  # vocabularies are not known either then
    search = Search(written, interpolate(written), plan, held, plan_of)
    for path in (path for section in held for path in search.dead((section,), known)):
        yield decides_nothing(search.tree, path, "whatever it is, the plan is the same")


@dataclass(frozen=True)
class Search:
    """A graph, what its plan holds of it, and how it is planned again."""

    written: Tree
    tree: Tree  # the same with its ``${...}`` filled in
    plan: Plan
    held: Mapping[str, Any]  # by the graph's names
    plan_of: Callable[[Tree], Plan]

    def dead(self, path: TreePath, known: Collection[TreePath]) -> Iterator[TreePath]:
        """Yield the paths of what decides nothing at a path and below, the outermost alone."""
        holds = [self._holds(leaf) for leaf in self._leaves(path)]
        if path in known or all(holds):
            return
        if len(path) > 1 and not any(holds) and self._same(path):
            yield path
            return
        for name in self.tree.at(path).items:
            yield from self.dead((*path, name), known)

    def _leaves(self, path: TreePath) -> Iterator[TreePath]:
        place = self.tree.find(path)
        if place and not place.items:
            yield path
        for name in place.items if place else ():
            yield from self._leaves((*path, name))

    def _holds(self, path: TreePath) -> bool:
        """Return whether the plan holds a value, or it says nothing: null, or ???."""
        record: Any = ALL if self.tree.at(path).value in (None, OPEN) else self.held
        for name in path:
            if record is None or record is ALL:
                break
            if isinstance(record, ServePlan) and name == record.engine:
                continue  # a plan has the settings of its engine's section beside the others
            if isinstance(record, ServePlan) and name in SERVING and self._may_change_engine(path):
                return True
            if isinstance(record, Function):  # it is called with any attribute; of columns it reads some
                record = {"in": record.ins, "out": record.outs}.get(name, ALL)
            else:
                record = record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)
        return record is not None

    def _may_change_engine(self, path: TreePath) -> bool:
        """Return whether rlgraph chooses the engine of a serve section, by the machine: on another one the
        settings of another engine are read."""
        engine = self.tree.find((*path[:3], "engine"))
        return engine is None or engine.value == "auto"

    def _same(self, path: TreePath) -> bool:
        """Return whether each legal change of a value, or of a section, leaves the plan as it is.

        It matters too where the graph can't be without it, or refuses another value for more than its type.
        """
        is_section = bool(self.tree.at(path).items)
        has_legal_change = False
        for leaf, value in self._changes(path):
            try:
                changed = put(self.written, leaf, None if value is None else Tree.of(value), None)
                plan = self.plan_of(interpolate(changed))
            except GraphError as error:
                is_needed = is_section and leaf == path
                is_of_wrong_type = {problem.kind for problem in error.problems} == {"wrong-value"}
                may_be_refused = is_section or value is None or is_of_wrong_type
                if is_needed or not may_be_refused:
                    return False
                continue
            if _decided(plan) != _decided(self.plan):
                return False
            has_legal_change = True
        return has_legal_change

    def _changes(self, path: TreePath) -> Iterator[tuple[TreePath, Any]]:
        """Yield what may be changed at a path, and into what; None takes it out."""
        yield path, None
        for leaf in self._leaves(path):
            value = self.tree.at(leaf).value
            if leaf != path:
                yield leaf, None
            if isinstance(value, bool):
                yield leaf, not value
            elif isinstance(value, int | float):
                yield from ((leaf, other) for other in (value + 1, value * 2, value / 2, value - 1))
            elif isinstance(value, str):
                names = (*self.plan.columns["train"], *self.plan.pools, *self.plan.models)
                yield from ((leaf, other) for other in (f"{value}_", *names) if other != value)


def _decided(plan: Plan) -> Plan:
    """Return a plan without what it only repeats of the graph's text."""
    return replace(plan, digest="", open_values=())
