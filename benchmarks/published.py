"""How far are plans from runs that others measured? See docs/cost_model.md.

    python benchmarks/published.py

Every row of published.yaml is planned as ``rlgraph plan GRAPH --cluster NAME`` plans it: settings that a run
publishes are set, all others are as the planner settles them. Where that does not fit, the first change is
made that the refusal offers. Nothing is calibrated, on any run. The engines that were measured are others
than ours, and train with other divisions of a model.

Where a run does not publish the mean length of its responses, it is inferred: the one at which the middle of
what is predicted for one of its phases is the measured time. Such rows stand apart, that phase counts in no
error, and they say less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import yaml

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.units import middle

ROWS = Path(__file__).with_suffix(".yaml")
PHASES = ("generation", "scoring", "update", "iteration")
KINDS = {
    "generate": "generation",
    "score": "scoring",
    "update": "update",
}  # of steps, as calibrations have them
Seconds = tuple[float, float]  # at best, at worst


@dataclass(frozen=True)
class Run:
    """One published run. The head of published.yaml says what its fields are."""

    run: str
    source: str
    model: str
    cluster: str
    prompts: int
    samples: int
    tokens: tuple[float, float]
    most: int
    mini: int
    server: int
    seconds: Mapping[str, float]
    graph: str = "grpo"
    apart: int = 0
    experts: int = 1
    inferred: str = ""
    changed: tuple[str, ...] = field(default=())  # what was changed so that it fits

    @property
    def settings(self) -> list[str]:
        """Return what the run publishes, as it is typed."""
        cluster = load_cluster(self.cluster)
        given = [
            f"prompts.batch={self.prompts}",
            f"rollout.n={self.samples}",
            f"models.policy.path={self.model}",
        ]
        given += [f"rollout.max_new_tokens={self.most}", f"update_policy.minibatches={self.mini}"]
        given += [f"models.policy.serve.tensor_parallel={self.server}"]
        if self.server > cluster.devices:
            given += [f"models.policy.serve.hosts={self.server // cluster.devices}"]
        trained = ["policy"]
        if self.apart:
            pools = f"train: {{devices: {cluster.total - self.apart}}}, gen: {{devices: {self.apart}}}"
            given += [f"pools={{{pools}}}"]
        elif self.graph == "grpo":
            given += [f"models.ref.path={self.model}"]
            trained += ["ref"]
        if self.experts > 1:
            given += [f"models.{name}.train.expert_parallel={self.experts}" for name in trained]
        return [*given, *self.changed]

    def planned(self) -> Plan:
        """Return its plan on its cluster, not calibrated.

        Raises:
            GraphError: it does not fit, with the changes that help.
        """
        prompt, response = self.tokens
        target = Target(self.cluster, prompt_tokens=prompt, response_tokens=response)
        return compile_graph("decoupled_ppo" if self.apart else self.graph, self.settings, target=target)

    def predicted(self) -> dict[str, Seconds]:
        """Return the seconds of each phase, at best and at worst."""
        plan = self.planned()
        assert plan.predicted
        spent = {phase: [0.0, 0.0] for phase in PHASES}
        for step in plan.steps:
            phase = KINDS.get(step.rate)
            for grade in (0, 1) if phase and step.seconds else ():
                spent[phase][grade] += step.seconds[grade]
        return {name: (best, worst) for name, (best, worst) in spent.items()} | {
            "iteration": plan.predicted.seconds
        }


def fitting(run: Run) -> Run:
    """Return a run that fits: itself, or with the first change that its refusal offers."""
    try:
        run.planned()
    except GraphError as error:
        first = next(re.finditer(r"^\s*(models\..*?)\s+#", error.problems[0].remedy, re.M))
        return replace(run, changed=tuple(first[1].split()))
    return run


def with_length(run: Run) -> Run:
    """Return a run with the mean response that its inferred phase says, where it is not published."""
    if not run.inferred:
        return run
    low, high = 16.0, float(run.most)
    while high / low > 1.002:
        mean = math.sqrt(low * high)
        tried = replace(run, tokens=(run.tokens[0], mean))
        short = middle(tried.predicted()[run.inferred]) < run.seconds[run.inferred]
        low, high = (mean, high) if short else (low, mean)
    return replace(run, tokens=(run.tokens[0], round(low)))


def runs() -> list[Run]:
    """Return all rows, each as it fits, with the lengths that are inferred."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["runs"]
    return [with_length(fitting(Run(**row | {"tokens": tuple(row["tokens"])}))) for row in rows]


def compared(run: Run) -> Iterator[tuple[str, float, Seconds, float]]:
    """Yield each measured phase: its name, its seconds, what is predicted, and their ratio."""
    predicted = run.predicted()
    for phase, seconds in run.seconds.items():
        yield phase, seconds, predicted[phase], middle(predicted[phase]) / seconds


def error(ratios: list[float]) -> float:
    """Return the geometric error of predictions, as a factor: of how many times they are off, up or down.

    Example:
        >>> round(error([0.5, 2.0, 1.0]), 2)
        1.59
    """
    return math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))


def show(title: str, rows: list[Run]) -> None:
    """Print a table of runs, and the error of each phase."""
    print(
        f"{title}\n  {'run':<30}{'from':<12}{'phase':<12}{'measured':>9}{'predicted':>18}{'ratio':>7}  inside"
    )
    ratios: dict[str, list[tuple[float, bool]]] = {phase: [] for phase in PHASES}
    for run in rows:
        for phase, seconds, (best, worst), ratio in compared(run):
            inside, inferred = best <= seconds <= worst, phase == run.inferred
            said = "inferred from" if inferred else "yes" if inside else "no"
            span = f"{best:,.0f} to {worst:,.0f} s"
            print(
                f"  {run.run:<30}{run.source:<12}{phase:<12}{seconds:>7.1f} s{span:>18}{ratio:>7.2f}  {said}"
            )
            if not inferred:
                ratios[phase].append((ratio, inside))
    for phase, found in ratios.items():
        if found:
            values, inside = [ratio for ratio, _ in found], sum(inside for _, inside in found)
            bias = math.exp(sum(map(math.log, values)) / len(values))
            print(
                f"  {phase}: geometric error {error(values):.2f} x, middle of all {bias:.2f} x, "
                f"{inside} of {len(found)} inside"
            )
    for run in rows:
        if run.changed:
            print(f"  {run.run} ({run.source}) fits with {' '.join(run.changed)}")
        if run.inferred:
            print(f"  {run.run}: responses of {run.tokens[1]:,.0f} tokens")


def main() -> None:
    found = sorted(runs(), key=lambda run: bool(run.inferred))
    for inferred, rows in groupby(found, key=lambda run: bool(run.inferred)):
        show(f"mean lengths {'inferred' if inferred else 'published'}", list(rows))


if __name__ == "__main__":
    main()
