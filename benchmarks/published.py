"""How far are plans from runs that others measured? See docs/cost_model.md.

    python benchmarks/published.py

Every row of published.yaml is planned as ``rlgraph plan GRAPH --cluster NAME`` plans it: settings that a run
publishes are set, all others are as the planner settles them. Where that does not fit, the first change is
made that the refusal offers. Nothing is calibrated, on any run. The engines that were measured are others
than ours, and train with other divisions of a model.

What was measured alone, as decode steps and optimizer steps, is priced by the formulas of ``rlgraph/costs``.

Where a run does not publish the mean length of its responses, it is inferred: the one at which the middle of
what is predicted for one of its phases is the measured time. Such rows stand apart, that phase counts in no
error, and they say less. Their lengths are taken to be log-normal, the 99th percentile ten times the median.

Then the shares of an iteration that each measured phase takes stand beside the predicted ones, with whether
the plan names the phase that was the longest.

At last each run that is asynchronous is set against the one before it that is not: how many times as fast it
is, measured and predicted; where its update was measured, predicted also with an update of just that time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

import yaml

from rlgraph.autoplace import evaluator
from rlgraph.compiler import compile_graph
from rlgraph.costs.calibration import Calibration
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST, WORST, Rates
from rlgraph.costs.formulas import (
    Tokens,
    decode_seconds,
    decode_step_seconds,
    dispatch_seconds,
    prefill_seconds,
    update_seconds,
)
from rlgraph.costs.model_size import Size, size_of
from rlgraph.costs.plan_size import with_experts_divided
from rlgraph.costs.step_rates import rate_of
from rlgraph.errors import GraphError
from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.chosen import chosen_settings
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.lengths import Lengths
from rlgraph.planning.predict import Scenario, predict
from rlgraph.request import PlanRequest
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle

ROWS = Path(__file__).with_suffix(".yaml")
PHASES = ("generation", "scoring", "update", "sync", "iteration")
KINDS = {
    "generate": "generation",
    "score": "scoring",
    "update": "update",
    "sync": "sync",
}  # of steps, as calibrations have them
TAIL = 10  # the 99th percentile of lengths over the median, where lengths are inferred
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
    sequence: int = 1
    eager: bool = False
    recompute: bool | None = None
    host_step: bool = False
    with_sync: bool = False
    bypass: bool = False
    stream: int | None = None
    parts: int = 1
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
            given += [f"models.policy.serve.sglang.hosts={self.server // cluster.devices}"]
        if self.eager:
            given += ["models.policy.serve.sglang.options={disable_cuda_graph: true}"]
        if self.recompute is not None:
            given += [f"models.policy.train.recompute={str(self.recompute).lower()}"]
        if self.host_step:
            given += ["models.policy.train.optimizer_offload=true"]
        if self.bypass:
            given += ["update_policy.in.old_logprobs=rollout_logprobs"]
        trained = ["policy"]
        if self.apart:
            pools = f"train: {{devices: {cluster.total - self.apart}}}, gen: {{devices: {self.apart}}}"
            given += [f"pools={{{pools}}}"]
        elif self.graph == "grpo":
            given += [f"models.ref.path={self.model}"]
            trained += ["ref"]
        if self.stream is not None:
            given += ["update_policy.in.old_logprobs=rollout_logprobs"]
            given += [f"schedule.buffer={{staleness: {self.stream}, too_old: correct, lend: false}}"]
            trained += ["ref"] * (self.graph == "grpo")
            given += [f"models.ref.path={self.model}"] * (self.graph == "grpo")
        divided = {"expert_parallel": self.experts, "sequence_parallel": self.sequence}
        for key, count in divided.items():
            given += [f"models.{name}.train.{key}={count}" for name in trained if count > 1]
        return [*given, *self.changed]

    @property
    def planned_graph(self) -> str:
        """Return the graph that is planned: one step off, the shipped one that corrects for that."""
        return "decoupled_ppo" if self.apart and self.stream is None else self.graph

    @property
    def target(self) -> Target:
        """Return its cluster, and the lengths of its work."""
        prompt, mean = self.tokens
        lengths = {"mean": mean, "p50": 1.0, "p99": TAIL} if self.inferred else mean
        return Target(self.cluster, prompt_tokens=prompt, response_tokens=lengths)

    def planned(self) -> Plan:
        """Return its plan on its cluster, not calibrated.

        Raises:
            GraphError: it does not fit, with the changes that help.
        """
        return compile_graph(self.planned_graph, self.settings, target=self.target)

    def calibrated(self, factors: Mapping[str, float]) -> float:
        """Return the middle of an iteration's seconds with these factors on kinds of work."""
        scenario = Scenario.of(self.target)
        request = PlanRequest(self.planned_graph, self.settings, target=self.target)
        plan = evaluator(request).plan({})
        calibration = Calibration(calibration="phases", **{kind: [f, f] for kind, f in factors.items()})
        told = predict(plan, replace(scenario, calibration=calibration), must_fit=False).predicted
        assert told
        return middle(told.seconds) * self.parts

    def _phases_of(self, step: Step) -> Iterator[str]:
        """Yield the measured phases that a step's seconds are part of."""
        kind = rate_of(step)
        if kind in KINDS:
            yield KINDS[kind]
        moves_servers = isinstance(step.action, MoveEngine) and step.action.engine == "serve"
        if self.with_sync and (kind == "sync" or moves_servers):
            yield "generation"

    @cached_property
    def predicted(self) -> dict[str, Seconds]:
        """Return the seconds of each phase, at best and at worst."""
        plan = self.planned()
        assert plan.predicted
        spent = {phase: [0.0, 0.0] for phase in PHASES}
        for step in plan.steps:
            for phase in self._phases_of(step) if step.seconds else ():
                spent[phase][0] += step.seconds[0]
                spent[phase][1] += step.seconds[1]
        whole = {**spent, "iteration": plan.predicted.seconds}
        return {name: (best * self.parts, worst * self.parts) for name, (best, worst) in whole.items()}


@dataclass(frozen=True)
class Alone:
    """Work that was measured alone. published.yaml says what its fields are."""

    work: str
    source: str
    kind: str
    model: str
    cluster: str
    rows: int
    seconds: float
    server: int = 1
    context: float = 0.0
    tokens: tuple[float, float] = (0.0, 0.0)
    eager: bool = False
    passes: int = 1
    forwards: float = 3.0
    experts: int = 1
    memory_bandwidth: float | None = None

    @property
    def size(self) -> Size:
        """Return the size of its model, whose experts devices may divide."""
        return with_experts_divided(size_of(self.model), self.experts)

    @property
    def predicted(self) -> Seconds:
        """Return its seconds, at best and at worst."""
        price = PRICES[self.kind]
        return price(self, BEST), price(self, WORST)

    def rates(self, devices: int, grade: int) -> Rates:
        """Return the rates of devices that share a model, or are one server."""
        cluster = load_cluster(self.cluster)
        if self.memory_bandwidth:
            cluster = cluster.model_copy(update={"memory_bandwidth": self.memory_bandwidth})
        return Rates(cluster, devices, "bfloat16", grade, group=self.server)


def decode(work: Alone, grade: int) -> float:
    """Return the seconds of a decode step."""
    rates = work.rates(work.server, grade)
    return decode_step_seconds(work.size, rates, work.rows, work.context, not work.eager)


def requests(work: Alone, grade: int) -> float:
    """Return the seconds of requests that come to a server at once, all of one length."""
    rates, (prompt, response) = work.rates(work.server, grade), work.tokens
    lengths = Lengths(response, response)
    decoding = decode_seconds(work.size, rates, work.rows, work.rows, prompt, lengths, not work.eager)
    return prefill_seconds(work.size, rates, work.rows, prompt) + decoding


def training(work: Alone, grade: int) -> float:
    """Return the seconds of an optimizer step on all devices of the cluster."""
    devices = load_cluster(work.cluster).total
    rates, length = work.rates(devices, grade), sum(work.tokens)
    rows = work.rows / devices
    load = Tokens(rows * length, rows * length**2, work.passes)
    seconds = update_seconds(work.size, rates, load, 1, work.forwards)
    group = replace(rates, devices=work.experts, replicas=devices // work.experts)
    return seconds + dispatch_seconds(work.size, group, 2 * load.tokens, 2 * work.passes)


PRICES: Mapping[str, Callable[[Alone, int], float]] = {
    "decode": decode,
    "requests": requests,
    "training": training,
}


@cache
def alone() -> tuple[Alone, ...]:
    """Return all work that was measured alone."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["alone"]
    return tuple(Alone(**row | {"tokens": tuple(row.get("tokens", (0.0, 0.0)))}) for row in rows)


def fitting(run: Run) -> Run:
    """Return a run that fits: itself, with what the planner chooses for it, or with the first change that its
    refusal offers."""
    try:
        plan = run.planned()
    except GraphError as error:
        first = next(re.finditer(r"^\s*(models\..*?)\s+#", error.problems[0].remedy, re.M))
        return replace(run, changed=tuple(first[1].split()))
    return replace(run, changed=tuple(overrides(chosen_settings(plan))))


def with_length(run: Run) -> Run:
    """Return a run with the mean response that its inferred phase says, where it is not published."""
    if run.inferred not in run.seconds:
        return run
    low, high = 16.0, float(run.most)
    while high / low > 1.002:
        mean = math.sqrt(low * high)
        tried = replace(run, tokens=(run.tokens[0], mean))
        short = middle(tried.predicted[run.inferred]) < run.seconds[run.inferred]
        low, high = (mean, high) if short else (low, mean)
    return replace(run, tokens=(run.tokens[0], round(low)))


@cache
def runs() -> tuple[Run, ...]:
    """Return all rows, each as it fits, with the lengths that are inferred: those of a run that streams are
    those of the one before it that does not."""
    found = list[Run]()
    for row in yaml.safe_load(ROWS.read_text(encoding="utf-8"))["runs"]:
        run = Run(**row | {"tokens": tuple(row["tokens"])})
        if run.inferred and run.stream is not None:
            run = replace(run, tokens=before(found).tokens)
        found.append(with_length(fitting(run)))
    return tuple(found)


def before(found: Sequence[Run]) -> Run:
    """Return the last run that is not asynchronous."""
    return next(run for run in reversed(found) if not run.apart)


def is_inferred(run: Run) -> bool:
    """Return whether the mean length of its responses is not published."""
    return bool(run.inferred)


def compared(run: Run) -> Iterator[tuple[str, float, Seconds, float]]:
    """Yield each measured phase: its name, its seconds, what is predicted, and their ratio."""
    predicted = run.predicted
    for phase, seconds in run.seconds.items():
        yield phase, seconds, predicted[phase], middle(predicted[phase]) / seconds


def error(ratios: list[float]) -> float:
    """Return the geometric error of predictions, as a factor: of how many times they are off, up or down.

    Example:
        >>> round(error([0.5, 2.0, 1.0]), 2)
        1.59
    """
    return math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))


def error_text(found: Sequence[tuple[float, bool]]) -> str:
    """Return the error of predictions, each as its ratio to what was measured and whether that is inside."""
    values = [ratio for ratio, _ in found]
    inside = sum(is_inside for _, is_inside in found)
    bias = math.exp(sum(map(math.log, values)) / len(values))
    return (
        f"geometric error {error(values):.2f} x, middle of all {bias:.2f} x, {inside} of {len(found)} inside"
    )


def show_alone(rows: Sequence[Alone]) -> None:
    """Print a table of work that was measured alone, and the error of each kind."""
    print(f"measured alone\n  {'work':<40}{'from':<12}{'measured':>12}{'predicted':>24}{'ratio':>7}  inside")
    ratios: dict[str, list[tuple[float, bool]]] = {kind: [] for kind in PRICES}
    for row in rows:
        best, worst = row.predicted
        ratio, inside = middle((best, worst)) / row.seconds, best <= row.seconds <= worst
        ratios[row.kind].append((ratio, inside))
        span = f"{milliseconds(best)} to {milliseconds(worst)} ms"
        measured = f"{milliseconds(row.seconds)} ms"
        said = "yes" if inside else "no"
        print(f"  {row.work:<40}{row.source:<12}{measured:>12}{span:>24}{ratio:>7.2f}  {said}")
    for kind, found in ratios.items():
        print(f"  {kind}: {error_text(found)}")


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits.

    Example:
        >>> milliseconds(0.0024145), milliseconds(75.91)
        ('2.41', '75,910')
    """
    value = 1000 * seconds
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def shares(found: Sequence[Run]) -> None:
    """Print which share of an iteration each measured phase takes, and whether a plan finds the longest."""
    print("shares of an iteration, measured and (in brackets) predicted")
    for run in found:
        measured = {phase: run.seconds[phase] for phase in PHASES[:3] if phase in run.seconds}
        if len(measured) < 2 or run.apart:
            continue
        ours, whole = run.predicted, run.seconds["iteration"]
        texts = []
        for phase, seconds in measured.items():
            share = middle(ours[phase]) / middle(ours["iteration"])
            texts.append(f"{phase} {seconds / whole:.0%} ({share:.0%})")
        print(f"  {run.run:<28}{run.source:<12}{', '.join(texts):<64}longest: {longest(run)}")


def longest(run: Run) -> str:
    """Return whether a plan finds the phase of a run that was measured to be the longest.

    It is ``yes`` if the middle of what is predicted for it is the longest, too, ``maybe`` if ranges overlap,
    so that it may be, and otherwise ``no``.
    """
    phases = [phase for phase in PHASES[:3] if phase in run.seconds]
    measured = max(phases, key=run.seconds.__getitem__)
    ours = run.predicted
    first = max(phases, key=lambda phase: middle(ours[phase]))
    if first == measured:
        return "yes"
    return "maybe" if ours[measured][1] >= ours[first][0] else "no"


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
            print(f"  {phase}: {error_text(found)}")
    for run in rows:
        if run.changed:
            print(f"  {run.run} ({run.source}) fits with {' '.join(run.changed)}")
        if run.inferred in run.seconds:
            print(f"  {run.run}: responses of {run.tokens[1]:,.0f} tokens")


def gains(found: Sequence[Run]) -> None:
    """Print how many times as fast runs are that are asynchronous, measured and predicted."""
    print("asynchronous runs against synchronous ones")
    print(f"  {'run':<36}{'from':<12}measured  predicted  its own update")
    off = list[float]()
    for number, run in enumerate(found):
        if not run.apart or "iteration" not in run.seconds:
            continue
        base = before(found[:number])
        ours, theirs = run.predicted, base.predicted
        measured = base.seconds["iteration"] / run.seconds["iteration"]
        gain = middle(theirs["iteration"]) / middle(ours["iteration"])
        off.append(gain / measured)
        updated = ""
        if "update" in run.seconds:
            own = run.calibrated({"update": run.seconds["update"] / middle(ours["update"])})
            updated = f"{base.seconds['iteration'] / own:>12.2f} x"
        name = f"{base.run.partition(',')[0]}, {run.run.removeprefix('the same').strip(' ,')}"
        print(f"  {name:<36}{run.source:<12}{measured:>6.2f} x{gain:>9.2f} x{updated}")
    print(f"  geometric error {error(off):.2f} x")


def held_out(found: Sequence[Run]) -> None:
    """Print what is predicted of Qwen3-30B-A3B on GB200, which was slower where it was asynchronous, at the
    rates of its two other runs: training takes all of the one, generation what is left of the other."""
    together, wide, alone, apart = (run for run in found if "30B" in run.model and "gb200" in run.cluster)
    training, both = (
        sum(middle(run.predicted[phase]) for phase in ("scoring", "update")) for run in (wide, together)
    )
    trained = wide.seconds["iteration"] / training
    generated = together.seconds["iteration"] - trained * both
    generated /= middle(together.predicted["generation"])
    factors = {"score": trained, "update": trained, "generate": generated}
    once, ahead = alone.calibrated(factors), apart.calibrated(factors)
    measured = alone.seconds["iteration"] / apart.seconds["iteration"]
    print("Qwen3-30B-A3B, 16 x GB200, at the rates of its other runs")
    print(f"  {once:.0f} s, 1 step off {ahead:.0f} s: {once / ahead:.2f} x, measured {measured:.2f} x")


def main() -> None:
    found = runs()
    show_alone(alone())
    for inferred, rows in groupby(sorted(found, key=is_inferred), key=is_inferred):
        show(f"mean lengths {'inferred' if inferred else 'published'}", list(rows))
    shares(found)
    gains(found)
    held_out(found)


if __name__ == "__main__":
    main()
