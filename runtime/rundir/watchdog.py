"""A watchdog that reads a run's metrics: it reports a run that does not learn, or whose engines drift apart.

A rule raises an alarm once its bounds have held for so many iterations in a row; all of them are in
watchdog.yaml.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import yaml

from rlgraph.ir.domains import ancestors
from rlgraph.ir.plan import Plan

BASELINE_LINES = 5  # the first lines that have a metric: their mean is its baseline


class Rule(NamedTuple):
    """Something that goes wrong, as watchdog.yaml describes it.

    Attributes:
        name: the rule's key in the file.
        when: bounds that have to hold together, as ``METRIC >= NUMBER`` or ``METRIC <= NUMBER baseline``.
        times: iterations in a row for which they have to hold.
        law: what the alarm says, with ``{value}`` and ``{first}``.
        why: what it means.
        edits: edits of the graph that may help, with names that ``_edit_values`` gives.
        stale: whether the rule is for runs with (true) or without (false) rows of older weights; None: both.
    """

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
    """Reads a run's metrics line by line; each rule raises at most one alarm per node.

    Invariants:
        - ``baseline`` has at most the first ``BASELINE_LINES`` values of each metric.
        - ``streak`` counts, per rule and node, the lines in a row in which the rule's bounds have held; lines
          that lack a metric of the rule count neither way.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        has_old_rows = _has_old_rows(plan)
        self.rules = [rule for rule in rules() if rule.stale in (None, has_old_rows)]
        self.baseline: dict[str, list[float]] = defaultdict(list)
        self.streak: Counter[tuple[str, str]] = Counter()
        self.alarmed: set[tuple[str, str]] = set()

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read a line of metrics; return the alarms that it raises (rlgraph/printing/alarm.py)."""
        values: dict[str, float] = {}
        for name, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values[name] = value
                if len(self.baseline[name]) < BASELINE_LINES:
                    self.baseline[name].append(value)
        alarms: list[dict[str, Any]] = []
        for rule in self.rules:
            for node in _nodes(rule, values):
                if self._raises_alarm(rule, node, values):
                    alarms.append({"step": line["step"], **self._alarm(rule, node, values)})
        return alarms

    def _raises_alarm(self, rule: Rule, node: str, values: Mapping[str, float]) -> bool:
        """Count this line for a rule; return whether its bounds have held often enough for the first time."""
        bounds = [bound.replace("*", node).split() for bound in rule.when.split(", ")]
        names = {name for name, *_ in bounds}
        if not names <= values.keys():
            return False
        key = (rule.name, node)
        are_met = all(self._is_met(*bound, values=values) for bound in bounds)
        self.streak[key] = self.streak[key] + 1 if are_met else 0
        if self.streak[key] != rule.times or key in self.alarmed:
            return False
        self.alarmed.add(key)
        return True

    def _is_met(self, name: str, sign: str, number: str, *unit: str, values: Mapping[str, float]) -> bool:
        """Return whether a bound holds; with a ``unit`` its number is a multiple of the metric's baseline."""
        limit = float(number)
        if unit:
            baseline = self.baseline[name]
            if len(baseline) < BASELINE_LINES:
                return False
            limit *= sum(baseline) / BASELINE_LINES
        if sign == ">=":
            return values[name] >= limit
        highest = values[name]
        if not unit:
            # the rewards of one node may be equal while those of another tell samples apart
            for metric, value in values.items():
                if metric.endswith(f"/{name}"):
                    highest = max(highest, value)
        return highest <= limit

    def _alarm(self, rule: Rule, node: str, values: Mapping[str, float]) -> dict[str, Any]:
        name = rule.when.split()[0].replace("*", node)
        baseline = self.baseline[name]
        numbers = {"value": values[name], "first": sum(baseline) / len(baseline)}
        edit_values = _edit_values(self.plan, node)
        edits: list[str] = []
        for template in rule.edits:
            if _placeholders(template) <= edit_values.keys():
                edit = template.format_map(edit_values)
                if not _is_set(self.plan, edit):
                    edits.append(edit)
        law = f"{rule.law.format_map(numbers)}: `{name}`"
        if rule.times > 1:
            law += f", {rule.times} iterations in a row"
        return {"rule": rule.name, "law": law, "why": rule.why.format_map(numbers), "edits": edits}


def _has_old_rows(plan: Plan) -> bool:
    """Return whether updates train on rows of older weights: streamed, kept by a refill, or replayed."""
    if plan.schedule.ahead:
        return True
    if any(region.keep for region in plan.regions.values()):
        return True
    return any(function.holds for function in plan.functions["train"].values())


def _nodes(rule: Rule, values: Mapping[str, float]) -> list[str]:
    """Return the nodes that the ``*`` of a rule's first bound stands for; [""] if it has no ``*``."""
    start, star, end = rule.when.split()[0].partition("*")
    if not star:
        return [""]
    nodes = []
    for name in values:
        if name.startswith(start) and name.endswith(end):
            nodes.append(name.removeprefix(start).removesuffix(end))
    return nodes


def _edit_values(plan: Plan, node: str) -> dict[str, Any]:
    """Return the names and values of the graph that edits may contain.

    They are those of the first rollout, and of ``node`` or else of the first node that updates a policy.
    """
    functions = plan.functions["train"]
    values: dict[str, Any] = {}
    rollout = next((name for name, function in functions.items() if "response_limit" in function.roles), None)
    if rollout is not None:
        values["rollout"] = rollout
        values["more_tokens"] = 2 * functions[rollout].value("response_limit")
        samples_per_prompt = functions[rollout].attributes.get("n")
        if samples_per_prompt:
            values["more_n"] = 2 * samples_per_prompt

    if _may_refill(plan, node):
        values["filter"] = node

    node = node or _policy_update(plan)
    if node not in functions:
        return values
    model = plan.models.get(functions[node].model or "")
    if model is None:
        return values
    values["node"] = node
    values["model"] = functions[node].model
    if model.train and model.serve and model.serve.dtype != model.train.dtype:
        values["dtype"] = model.train.dtype
    if model.optimizer and isinstance(model.optimizer.lr, float) and model.rate is None:
        values["half_lr"] = model.optimizer.lr / 2
        values["more_lr"] = 3 * model.optimizer.lr
    kl_coef = functions[node].attributes.get("kl_coef")
    if isinstance(kl_coef, float) and "kl_coef" not in functions[node].courses:
        values["more_kl"] = 4 * kl_coef or 0.001
    return values


def _may_refill(plan: Plan, node: str) -> bool:
    """Return whether a node is a filter that may draw more rows from a data source, and does not yet."""
    step = next((step for step in plan.steps if step.node == node and step.run), None)
    if step is None or not step.run or not step.run.filters or plan.regions:
        return False
    source = ancestors(plan.domains["train"], plan.columns["train"][step.writes[0]].domain)[-1]
    return not source.held and not source.parts


def _policy_update(plan: Plan) -> str:
    """Return the first node that updates a model which generates, or ""."""
    served = {name for name, model in plan.models.items() if model.serve}
    for step in plan.steps:
        if step.updated and served & step.models.keys():
            return step.node
    return ""


def _placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _is_set(plan: Plan, edit: str) -> bool:
    """Return whether the graph already has the value that an edit of a node would set."""
    path, _, value = edit.partition("=")
    node, _, attribute = path.partition(".")
    function = plan.functions["train"].get(node)
    return function is not None and str(function.attributes.get(attribute)) == value
