"""A watchdog reads a run's metrics, and says once where it learns nothing, collapses, or engines drift apart.

A rule speaks up once its bounds have held for so many iterations in a row: they are all in watchdog.yaml.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import yaml

from rlgraph.ir.plan import Plan

FIRST = 5  # lines whose mean is what a metric began with


class Rule(NamedTuple):
    """Something that goes wrong, as watchdog.yaml describes it."""

    name: str
    when: str
    times: int
    law: str
    why: str
    edits: Sequence[str] = ()
    stale: bool | None = None


def rules() -> list[Rule]:
    """Return all rules."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return [Rule(name, **rule) for name, rule in yaml.safe_load(text).items()]


class Watchdog:
    """Reads a run's metrics line by line; each rule speaks up once, of each node."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rules = plan, [rule for rule in rules() if rule.stale in (None, _has_old_rows(plan))]
        self.began: dict[str, list[float]] = defaultdict(list)
        self.held: Counter[tuple[str, str]] = Counter()  # rule, node -> lines in a row
        self.spoke = set[tuple[str, str]]()

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take a line of metrics; return the alarms that there are now (rlgraph/printing/alarm.py)."""
        values = {name: v for name, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}
        for name, value in values.items():
            self.began[name] += [value] * (len(self.began[name]) < FIRST)
        alarms = []
        for rule, node in ((one, node) for one in self.rules for node in _nodes(one, values)):
            bounds = [bound.replace("*", node).split() for bound in rule.when.split(", ")]
            if any(name not in values for name, *_ in bounds):
                continue  # an iteration that measures less tells nothing
            holds = all(self._holds(*bound, values=values) for bound in bounds)
            self.held[rule.name, node] = self.held[rule.name, node] + 1 if holds else 0
            if self.held[rule.name, node] == rule.times and (rule.name, node) not in self.spoke:
                self.spoke.add((rule.name, node))
                alarms.append({"step": line["step"], **self._alarm(rule, node, values)})
        return alarms

    def _holds(self, name: str, sign: str, bound: str, *first: str, values: Mapping[str, float]) -> bool:
        began = self.began[name]
        if first and len(began) < FIRST:
            return False
        limit = float(bound) * (sum(began) / FIRST if first else 1.0)
        if sign == ">=":
            return values[name] >= limit
        # the rewards of one node may be alike while those of another tell samples apart
        others = [] if first else [v for other, v in values.items() if other.endswith(f"/{name}")]
        return max([values[name], *others]) <= limit

    def _alarm(self, rule: Rule, node: str, values: Mapping[str, float]) -> dict[str, Any]:
        name = rule.when.split()[0].replace("*", node)
        numbers = {"value": values[name], "first": sum(self.began[name]) / len(self.began[name])}
        names = _names(self.plan, node)
        every = [edit.format_map(names) for edit in rule.edits if _named(edit) <= names.keys()]
        edits = [edit for edit in every if not _is_set(self.plan, edit)]
        law = f"{rule.law.format_map(numbers)}: `{name}`, {rule.times} iterations in a row"
        return {"rule": rule.name, "law": law, "why": rule.why.format_map(numbers), "edits": edits}


def _has_old_rows(plan: Plan) -> bool:
    """Return whether updates have rows that older weights drew: ahead of training, kept, or replayed."""
    kept = any(region.keep for region in plan.regions.values())
    replayed = any(one.holds for one in plan.functions["train"].values())
    return bool(plan.schedule.staleness) or kept or replayed


def _nodes(rule: Rule, values: Mapping[str, float]) -> list[str]:
    """Return the nodes that have recorded the metric of a rule's first bound; "" where that is of no node."""
    start, star, end = rule.when.split()[0].partition("*")
    names = [name.removeprefix(start) for name in values if name.startswith(start) and name.endswith(end)]
    return [name.removesuffix(end) for name in names] if star else [""]


def _names(plan: Plan, node: str) -> dict[str, Any]:
    """Return the graph's names and values for edits: of a node, or of the first that updates a policy."""
    functions, names = plan.functions["train"], dict[str, Any]()
    for name, function in functions.items():
        if "response_limit" in function.roles and "rollout" not in names:
            n, tokens = function.attributes.get("n"), function.value("response_limit")
            names |= {"rollout": name, "more_tokens": 2 * tokens} | ({"more_n": 2 * n} if n else {})
    served = {name for name, model in plan.models.items() if model.serve}
    updates = (step.node for step in plan.steps if step.updates and served & step.models.keys())
    node = node or next(updates, "")
    if node in functions and (held := plan.models.get(functions[node].model or "")):
        names |= {"node": node, "model": functions[node].model}
        differ = held.train and held.serve and held.serve.dtype != held.train.dtype
        names |= {"dtype": held.train.dtype} if held.train and differ else {}
        if held.optimizer and isinstance(held.optimizer.lr, float) and held.rate is None:
            names |= {"half_lr": held.optimizer.lr / 2, "more_lr": 3 * held.optimizer.lr}
        held_back = functions[node].attributes.get("kl_coef")
        if isinstance(held_back, float) and "kl_coef" not in functions[node].courses:
            names["more_kl"] = 4 * held_back or 0.001
    return names


def _named(edit: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(edit) if name}


def _is_set(plan: Plan, edit: str) -> bool:
    """Return whether an edit of a node is what the graph has already."""
    name, _, value = edit.partition("=")
    node, _, attribute = name.partition(".")
    function = plan.functions["train"].get(node)
    return bool(function and str(function.attributes.get(attribute)) == value)
