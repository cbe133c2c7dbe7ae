"""A watchdog reads a run's metrics, and says once where it learns nothing, collapses, or engines drift apart.

``RULES`` is the whole of it: a rule speaks up once all its conditions have held for so many iterations in a
row. docs/troubleshooting.md lists them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from rlgraph.ir.plan import Plan

FIRST = 5  # lines whose mean is what a metric began with


@dataclass(frozen=True)
class Condition:
    """A bound on a metric; ``*/entropy`` is that of any node, the same one in all conditions of a rule.

    With ``of_first`` the bound is a multiple of what the metric began with.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    of_first: bool = False


@dataclass(frozen=True)
class Rule:
    """Something that goes wrong: when, what to say, and settings that may help.

    In braces: ``value`` and ``first`` of the first condition's metric, and what ``_names`` has of the graph.
    """

    name: str
    conditions: tuple[Condition, ...]
    law: str
    why: str
    edits: tuple[str, ...]
    times: int = 10


def least(metric: str, bound: float, of_first: bool = False) -> Condition:
    """Return the condition that a metric is at least so high."""
    return Condition(metric, at_least=bound, of_first=of_first)


def most(metric: str, bound: float, of_first: bool = False) -> Condition:
    """Return the condition that a metric is at most so high."""
    return Condition(metric, at_most=bound, of_first=of_first)


NO_MORE_REWARD = most("reward/mean", 1.0, of_first=True)
SOME_FAIL = least("reward/std", 0.3)  # of rewards 0 and 1: between a tenth and nine tenths are right
SLOWER = "models.{model}.optimizer.lr={half_lr:g}"
RULES = (
    Rule(
        "reward-flat",
        (most("reward/std", 1e-6),),
        "all samples earn the same reward",
        "nothing tells them apart, so nothing is learned: the task is too hard or solved, or the reward does "
        "not read what the policy writes",
        ("{rollout}.n={more_n}",),
    ),
    Rule(
        "groups-alike",
        (least("*/no_advantage", 0.9), least("reward/std", 1e-6)),
        "{value:.0%} of the tokens have no advantage",
        "the samples of most prompts earn the same as each other; dapo samples other prompts in their place",
        ("{rollout}.n={more_n}", "{rollout}.temperature=1.0"),
    ),
    Rule(
        "answers-unread",
        (least("reward/unparsed", 0.9),),
        "{value:.0%} of the responses have no answer that the reward can read",
        "show the form of the answer in the prompt, or fit the reward to what is in the run's samples",
        (),
    ),
    Rule(
        "cut-off",
        (least("rollout/truncated", 0.5),),
        "{value:.0%} of the responses are cut off",
        "they reach max_new_tokens before they answer",
        ("{rollout}.max_new_tokens={more_tokens}",),
    ),
    Rule(
        "entropy-gone",
        (most("*/entropy", 0.05), most("*/entropy", 0.1, of_first=True), SOME_FAIL),
        "the entropy is {value:.3g} nats per token; it began with {first:.3g}",
        "the policy has stopped exploring, and still fails",
        ("{node}.entropy_coef=0.001", SLOWER),
        5,
    ),
    Rule(
        "entropy-rising",
        (least("*/entropy", 3.0), least("*/entropy", 2.0, of_first=True), NO_MORE_REWARD),
        "the entropy is {value:.3g} nats per token; it began with {first:.3g}",
        "the policy dissolves into noise",
        (SLOWER,),
        5,
    ),
    Rule(
        "length-gone",
        (most("rollout/length", 0.2, of_first=True), NO_MORE_REWARD),
        "responses have {value:.4g} tokens; they began with {first:.4g}",
        "the policy has stopped answering at length, and earns no more",
        (SLOWER, "{node}.aggregate=token-mean"),
        5,
    ),
    Rule(
        "repetition",
        (least("rollout/repetitive", 0.2),),
        "{value:.0%} of the responses repeat themselves",
        "the policy is in loops",
        (SLOWER,),
        5,
    ),
    Rule(
        "engines-apart",
        (least("*/rollout_gap", 0.05),),
        "the engines that generate and train give a token probabilities that are {value:.3g} apart",
        "data types, kernels or the routing of experts differ; a node `rollout_weights: {{op: "
        "correction.tis, cap: 2.0}}` weighs tokens by how far",
        ("models.{model}.serve.dtype={dtype}",),
        5,
    ),
    Rule(
        "reference-left",
        (least("*/kl_ref", 1.0),),
        "the policy is {value:.3g} nats per token from the reference",
        "look for answers that fool the reward",
        ("{node}.kl_coef={more_kl:g}", SLOWER),
    ),
    Rule(
        "clipped",
        (least("*/clip_fraction", 0.3), least("*/ratio", 0.0)),
        "{value:.0%} of the tokens are outside the clip",
        "steps are too large for it",
        (SLOWER, "{node}.epochs=1"),
    ),
    Rule(
        "steps-skipped",
        (least("*/skipped", 1.0),),
        "optimizer steps are left out, as their gradients are not finite",
        "`rlgraph replay` shows the rows",
        (SLOWER, "schedule.on_nan=dump"),
        5,
    ),
    Rule(
        "critic-lost",
        (most("*/explained_variance", 0.0),),
        "the critic explains {value:.2g} of the returns",
        "it does harm: let it learn before the policy does, and faster",
        ("models.{model}.optimizer.lr={more_lr:g}",),
        20,
    ),
    Rule(
        "tools-fail",
        (least("rollout/tool_errors", 0.5),),
        "{value:.0%} of the calls of tools fail",
        "the run's samples and logs/ say how: the prompt may not show how to call them, or a tool be down",
        (),
    ),
)


class Watchdog:
    """Reads a run's metrics line by line; each rule speaks up once, of each node."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.began: dict[str, list[float]] = defaultdict(list)
        self.held: Counter[tuple[str, str]] = Counter()  # rule, node -> lines in a row
        self.spoke = set[tuple[str, str]]()

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take a line of metrics; return what there is to say now: see ``told``."""
        values = {name: v for name, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}
        for name, value in values.items():
            self.began[name] += [value] * (len(self.began[name]) < FIRST)
        alarms = []
        for rule, node in ((one, node) for one in RULES for node in _nodes(one, values)):
            bounds = [self._holds(condition, node, values) for condition in rule.conditions]
            self.held[rule.name, node] = self.held[rule.name, node] + 1 if all(bounds) else 0
            if self.held[rule.name, node] == rule.times and (rule.name, node) not in self.spoke:
                self.spoke.add((rule.name, node))
                alarms.append({"step": line["step"], **self._alarm(rule, node, values)})
        return alarms

    def _holds(self, condition: Condition, node: str, values: Mapping[str, float]) -> bool:
        name = condition.metric.replace("*", node)
        first = self.began.get(name, [])
        if name not in values or (condition.of_first and len(first) < FIRST):
            return False
        unit = sum(first) / FIRST if condition.of_first else 1.0
        low = condition.at_least is None or values[name] >= condition.at_least * unit
        return low and (condition.at_most is None or values[name] <= condition.at_most * unit)

    def _alarm(self, rule: Rule, node: str, values: Mapping[str, float]) -> dict[str, Any]:
        name = rule.conditions[0].metric.replace("*", node)
        numbers = {"value": values[name], "first": sum(self.began[name]) / len(self.began[name])}
        names = _names(self.plan, node)
        edits = [edit.format_map(names) for edit in rule.edits if _named(edit) <= names.keys()]
        law = f"{rule.law.format_map(numbers)}: `{name}`, {rule.times} iterations in a row"
        return {"rule": rule.name, "law": law, "why": rule.why.format_map(numbers), "edits": edits}


def told(alarm: Mapping[str, Any]) -> str:
    """Return an alarm as text: what is wrong, why that is, and settings to go on with.

    Example:
        >>> alarm = {"step": 30, "law": "half are cut off", "why": "they are long", "edits": ["rollout.n=2"]}
        >>> print(told(alarm | {"rule": "cut-off"}))
        after iteration 30: half are cut off (cut-off)
          they are long
          try rollout.n=2
    """
    tries = f"\n  try {', or '.join(alarm['edits'])}" if alarm["edits"] else ""
    return f"after iteration {alarm['step']}: {alarm['law']} ({alarm['rule']})\n  {alarm['why']}{tries}"


def _nodes(rule: Rule, values: Mapping[str, float]) -> list[str]:
    """Return the nodes that have recorded a rule's first metric; "" where that is of no node."""
    before, star, end = rule.conditions[0].metric.partition("*")
    if not star:
        return [""]
    return [name.removesuffix(end) for name in values if name.endswith(end) and name.startswith(before)]


def _names(plan: Plan, node: str) -> dict[str, Any]:
    """Return the graph's names and values for edits: of a node, or of the first that updates a policy."""
    functions, names = plan.functions["train"], dict[str, Any]()
    for name, function in functions.items():
        if "response_limit" in function.roles and "rollout" not in names:
            n, tokens = function.attributes.get("n"), function.value("response_limit")
            names |= {"rollout": name, "more_tokens": 2 * tokens} | ({"more_n": 2 * n} if n else {})
    served = {name for name, model in plan.models.items() if model.serve}
    node = node or next(
        (step.node for step in plan.steps if step.updates and served & step.models.keys()), ""
    )
    if node in functions and (held := plan.models.get(functions[node].model or "")):
        names |= {"node": node, "model": functions[node].model}
        names |= {"dtype": held.train.dtype} if held.train else {}
        if held.optimizer and isinstance(held.optimizer.lr, float):
            names |= {"half_lr": held.optimizer.lr / 2, "more_lr": 3 * held.optimizer.lr}
        if isinstance(held_back := functions[node].attributes.get("kl_coef"), float):
            names["more_kl"] = 4 * held_back or 0.001
    return names


def _named(edit: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(edit) if name}
