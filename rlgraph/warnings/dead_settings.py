"""Find dead settings: values that can be changed, or taken out, and the plan stays the same.

Nothing here knows what a setting means. A value that stands in the plan is in use, so far as
``rlgraph/laws/idle_settings.py`` does not say otherwise: the sections of models, pools and schedule that the
plan repeats, and what functions are called with. Any other value is changed, or
taken out, and the graph planned again:

    models.ref.serve.max_rows: 64 ─┬─> 65      same plan ─┐
                                   ├─> 128     same plan ─┼─> dead
                                   └─> (none)  same plan ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.engines.registry import SERVING
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.edge_edits import TreePath
from rlgraph.frontend.tree_paths import put
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan, ServePlan
from rlgraph.laws.settings import decides_nothing
from rlgraph.records import dataclass
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import OPEN, Tree

ALL = "all"  # in place of a record: the plan uses every value below, or may use it


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
    records = _records_of(plan)
    search = Search(written, interpolate(written), plan, records, plan_of)
    for section in records:
        for path in search.dead((section,), known):
            yield decides_nothing(search.tree, path, "whatever it is, the plan is the same")


def _records_of(plan: Plan) -> dict[str, Any]:
    """Return what stands in a plan, under the names that the graph's sections have for it."""
    train_functions = dict(plan.functions.get("train", {}))
    eval_functions = dict(plan.functions.get("eval", {}))
    models: Any = plan.models
    if any(name.startswith("models.") for name in plan.open_values):
        models = ALL  # vocabularies are not known either then
    evaluation = {
        "nodes": eval_functions,
        "report": plan.report,
        "every": plan.eval_every,
        "before": plan.eval_before,
    }
    return {"models": models, "nodes": eval_functions | train_functions, "eval": evaluation}


@dataclass(frozen=True)
class Search:
    """A graph, the records of its plan, and how it is planned again."""

    written: Tree
    tree: Tree  # the same with its ``${...}`` filled in
    plan: Plan
    records: Mapping[str, Any]  # by the names of the graph's sections
    plan_of: Callable[[Tree], Plan]

    def dead(self, path: TreePath, known: Collection[TreePath]) -> Iterator[TreePath]:
        """Yield the paths of what decides nothing at a path or below it, the outermost alone."""
        in_use = [self._is_in_use(leaf) for leaf in self._leaves(path)]
        if path in known or all(in_use):
            return
        is_section_of_graph = len(path) == 1
        if not is_section_of_graph and not any(in_use) and self._same(path):
            yield path
            return
        for name in self.tree.at(path).items:
            yield from self.dead((*path, name), known)

    def _leaves(self, path: TreePath) -> Iterator[TreePath]:
        tree = self.tree.find(path)
        if tree is None:
            return
        if not tree.items:
            yield path
        for name in tree.items:
            yield from self._leaves((*path, name))

    def _is_in_use(self, path: TreePath) -> bool:
        """Return whether a value stands in the plan, or says nothing: null, or ???."""
        if self.tree.at(path).value in (None, OPEN):
            return True
        record: Any = self.records
        for name in path:
            if record is None:
                return False
            if record is ALL:
                return True
            if isinstance(record, ServePlan):
                if name == record.engine:
                    continue  # a plan has the settings of its engine's section beside the others
                if name in SERVING and self._may_change_engine(path):
                    return True
            record = _member(record, name)
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
            child = None if value is None else Tree.of(value)
            try:
                plan = self.plan_of(interpolate(put(self.written, leaf, child, None)))
            except GraphError as error:
                is_needed = is_section and leaf == path
                is_of_wrong_type = {problem.kind for problem in error.problems} == {"wrong-value"}
                may_be_refused = is_section or value is None or is_of_wrong_type
                if is_needed or not may_be_refused:
                    return False
                continue
            if _without_text(plan) != _without_text(self.plan):
                return False
            has_legal_change = True
        return has_legal_change

    def _changes(self, path: TreePath) -> Iterator[tuple[TreePath, Any]]:
        """Yield what may be changed at a path, and into what; None takes it out."""
        yield path, None
        for leaf in self._leaves(path):
            if leaf != path:
                yield leaf, None
            for value in self._other_values(self.tree.at(leaf).value):
                yield leaf, value

    def _other_values(self, value: Any) -> list[Any]:
        """Return values of the same type that a setting might have instead."""
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, int | float):
            return [value + 1, value * 2, value / 2, value - 1]
        if isinstance(value, str):
            names = (f"{value}_", *self.plan.columns["train"], *self.plan.pools, *self.plan.models)
            return [name for name in names if name != value]
        return []


def _member(record: Any, name: str) -> Any:
    """Return what a record of a plan has under a graph's name for it; None where it has nothing."""
    if isinstance(record, Function):
        # a function is called with every attribute, but it may not read every column that it could
        columns = {"in": record.ins, "out": record.outs}
        return columns.get(name, ALL)
    if isinstance(record, Mapping):
        return record.get(name)
    return getattr(record, name, None)


def _without_text(plan: Plan) -> Plan:
    """Return a plan without what it only repeats of the graph's text."""
    return replace(plan, digest="", open_values=())
