"""Sets a run's measured steps beside predicted ones, from the plan and the metrics in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any

from rlgraph.costs.calibration import TICK, Calibration, calibration_text, fit
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.model_size import Size
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.step_rates import rate_of
from rlgraph.costs.workload import Workload, workload
from rlgraph.errors import RunError
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.graph_of_run import graph_of_run
from rlgraph.ir.chosen import chosen_settings
from rlgraph.ir.plan import Plan, Target
from rlgraph.lowering import plan_tree
from rlgraph.planning.auto_settings import as_planned, fixed
from rlgraph.planning.predict import Scenario, priced
from rlgraph.reports.plan_file import load
from rlgraph.request import PlanRequest
from rlgraph.search.evaluate import Evaluator
from rlgraph.syntax.source import Tree
from rlgraph.units import middle, plural

MetricsLine = Mapping[str, Any]
METRICS = "metrics.jsonl"  # the file of a run's metrics
SAY = "say what it ran on: --cluster NAME_OR_FILE"
PERCENTILES = ("p10", "p50", "p90", "p99")  # of response lengths, that rollouts record


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's metrics: one line per iteration, and one for step 0 where it was evaluated.

    A metric that was not finite, which is null in the file, is left out of its line.

    Raises:
        RunError: the folder holds no metrics.
    """
    lines = map(json.loads, whole_lines(_file(run_dir, METRICS)))
    return [{name: value for name, value in line.items() if value is not None} for line in lines]


def metrics_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics as ``read_metrics`` does; none where the run has not come so far."""
    return read_metrics(run_dir) if (run_dir / METRICS).is_file() else []


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, but for a last one that is still being written."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line; none where there is no file.

    A last one that is cut short while the run writes it is left out.
    """
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        text = line.rstrip(",")
        if text.startswith("{") and text.endswith("}"):
            records.append(json.loads(text))
    return records


def _file(run_dir: Path, name: str) -> Path:
    path = run_dir / name
    if not path.is_file():
        raise RunError(f"{run_dir} holds no run: there is no {path}")
    return path


def counted(lines: Sequence[MetricsLine]) -> list[MetricsLine]:
    """Return the timed iterations without the first, which warms up, unless it is the only one."""
    timed = [line for line in lines if "time/step" in line]
    return timed[1:] or timed


def response_tokens(lines: Sequence[MetricsLine]) -> float | None:
    """Return the mean tokens of a response over iterations; None where nothing was generated."""
    return mean_of(lines, "rollout/length")


def responses(lines: Sequence[MetricsLine]) -> dict[str, float]:
    """Return what is known of response lengths, as ``Lengths.of`` takes it; of nothing generated nothing."""
    metrics = {"mean": "rollout/length"}
    for percentile in PERCENTILES:
        metrics[percentile] = f"rollout/length_{percentile}"
    lengths = {}
    for name, metric in metrics.items():
        length = mean_of(lines, metric)
        if length is not None:
            lengths[name] = max(length, 1.0)
    return lengths


def measured_responses(run_dir: Path) -> dict[str, float]:
    """Return the same of a run's iterations.

    Raises:
        RunError: there is no run, or it has generated nothing.
    """
    lengths = responses(counted(read_metrics(run_dir)))
    if not lengths:
        raise RunError(f"{run_dir} has not generated: there is no rollout/length in its metrics")
    return lengths


def prompt_tokens(lines: Sequence[MetricsLine]) -> float | None:
    """Return the mean tokens of a prompt over iterations; None where nothing was generated."""
    return mean_of(lines, "rollout/prompt_length")


def mean_of(lines: Sequence[MetricsLine], name: str) -> float | None:
    """Return the mean of a metric over the lines that have it; None where none has."""
    values: list[float] = [line[name] for line in lines if name in line]
    if not values:
        return None
    return sum(values) / len(values)


def measured_work(
    target: Target | None, lines: Sequence[MetricsLine], prompt: float | None = None
) -> dict[str, Any]:
    """Return the assumptions of a run's plan, with lengths and turns as they were measured."""
    measured = {
        "prompt_tokens": prompt_tokens(lines) or prompt,
        "response_tokens": responses(lines),
        "turns": mean_of(lines, "rollout/turns"),
    }
    work = dict(target.assumptions) if target else {}
    for name, value in measured.items():
        if value:
            work[name] = value
    return work


def between_rounds(run_dir: Path, plan: Plan) -> Iterator[tuple[str, int, float]]:
    """Yield a rollout that streams, an iteration, and the median seconds of its device between two rounds.

    In these the device did nothing; the rounds are those that the iteration trained on.
    """
    streaming = {}
    for step in plan.steps:
        if step.unfinished and plan.regions[step.region].streams:
            streaming[step.id] = step.node
    gaps: dict[tuple[str, int], list[float]] = {}
    for bars in _bars_by_device(run_dir):
        for node, iteration, seconds in _gaps(bars, streaming):
            gaps.setdefault((node, iteration), []).append(seconds)
    for (node, iteration), seconds_between in sorted(gaps.items()):
        known = [seconds for seconds in seconds_between if not math.isnan(seconds)]
        if known:
            yield node, iteration, median(known)


def _bars_by_device(run_dir: Path) -> Iterator[list[Mapping[str, Any]]]:
    """Yield what each device of a run did, in order, from its timeline."""
    bars = [event for event in objects(run_dir / "timeline.json") if "part" not in event["args"]]
    bars.sort(key=lambda bar: (bar["pid"], str(bar["tid"]), bar["ts"]))
    for _, of_device in groupby(bars, key=lambda bar: (bar["pid"], bar["tid"])):
        yield list(of_device)


def _gaps(
    bars: Sequence[Mapping[str, Any]], streaming: Mapping[int, str]
) -> Iterator[tuple[str, int, float]]:
    """Yield a rollout, an iteration, and a device's idle seconds since the rollout before; at first NaN."""
    end, idle = math.nan, 0.0
    for bar in bars:
        idle += max(bar["ts"] - end, 0.0)
        end = bar["ts"] + bar["dur"]
        node = streaming.get(bar["args"]["step"])
        if node:
            yield node, bar["args"]["iteration"], idle / 1e6
            idle = 0.0


def _check_same_cluster(run_dir: Path, plan: Plan, cluster: Cluster) -> None:
    """Check that the name for which a run was planned still means the same cluster."""
    planned = plan.predicted.cluster if plan.predicted else cluster.cluster
    if planned != cluster.cluster:
        law = f"{run_dir} was planned for {planned}; that name is {cluster.cluster} here and now"
        raise RunError(f"{law}\n  {SAY}")


@dataclass(frozen=True)
class Priced:
    """A run's plan and cluster, and the mean of its prompts if one was given."""

    run_dir: Path
    plan: Plan
    cluster: Cluster
    prompt_tokens: float | None

    @staticmethod
    def of(run_dir: Path, cluster: str | None = None, prompt_tokens: float | None = None) -> Priced:
        """Load those of a folder; missing values are taken as planned.

        Raises:
            RunError: there is no run; or it was planned for no cluster and none is given; or that is smaller.
            GraphError: its plan was not written by this rlgraph; or the cluster or a model is not known.
        """
        plan = load(_file(run_dir, "plan.json"))
        target = plan.origin.target if plan.origin else None
        if cluster is not None:
            loaded = load_cluster(cluster)
        elif target is not None:
            loaded = load_cluster(target.cluster, margin=target.margin)
            _check_same_cluster(run_dir, plan, loaded)
        else:
            raise RunError(f"{run_dir} was planned for no cluster\n  {SAY}")
        devices = sum(plan.pools.values())
        if devices > loaded.total:
            raise RunError(f"{run_dir} ran on {devices} devices; {loaded.cluster} has {loaded.total}")
        if target and not prompt_tokens:
            prompt_tokens = target.prompt_tokens
        return Priced(run_dir, plan, loaded, prompt_tokens)

    def work(self, lines: Sequence[MetricsLine]) -> Workload:
        """Return the work of these iterations: prompts and responses as long as they were."""
        target = self.plan.origin.target if self.plan.origin else None
        return workload(self.plan, **measured_work(target, lines, self.prompt_tokens))

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """Return the sizes of the models."""
        return sizes_of(self.plan)

    def priced(self, lines: Sequence[MetricsLine]) -> Plan:
        """Return the plan with the uncalibrated model's prices of these iterations."""
        pricing = Pricing(self.plan, self.cluster, self.work(lines), self.sizes)
        return replace(priced(pricing), peak=pricing.peaks())

    def ratios(self, lines: Sequence[MetricsLine]) -> dict[str, dict[str, list[float]]]:
        """Return kind of work -> step -> measured over the middle of the predicted seconds, per iteration.

        Each iteration is held against a prediction for the mean length of its own responses: the ratio is one
        of rates.
        """
        ratios: dict[str, dict[str, list[float]]] = {}
        for line in lines:
            pricing = Pricing(self.plan, self.cluster, self.work([line]), self.sizes)
            for step in self.plan.steps:
                measured = line.get(f"time/{step.node}")
                if measured is None:
                    continue
                ratio = max(measured, TICK) / pricing.middle(step)
                ratios.setdefault(rate_of(step), {}).setdefault(step.node, []).append(ratio)
        iterations = {line["step"] for line in lines}
        for node, iteration, gap in between_rounds(self.run_dir, self.plan):
            if iteration in iterations:
                ratio = max(gap, TICK) / middle(ASSUMED.round)
                ratios.setdefault("round", {}).setdefault(node, []).append(ratio)
        return ratios

    def calibrated(self, lines: Sequence[MetricsLine]) -> Calibration:
        """Return factors for each kind of work: the spread of its measured over its predicted seconds."""
        factors = {}
        for kind, steps in self.ratios(lines).items():
            ratios = [*chain.from_iterable(steps.values())]
            factors[kind] = [*fit(ratios)]
        return Calibration(calibration=str(self.run_dir), **factors)

    def evaluator(self, lines: Sequence[MetricsLine]) -> Evaluator:
        """Return what plans and predicts the run's graph with other settings, calibrated on these iterations.

        Raises:
            GraphError: the graph is wrong, or neither its file nor the copy in the run's folder is there.
        """
        assert self.plan.origin
        graph, overrides = graph_of_run(self.run_dir, self.plan.origin.graph, self.plan.origin.overrides)
        origin = replace(self.plan.origin, graph=graph, overrides=overrides)

        def make_plan(tree: Tree, devices: int) -> Plan:
            plan = plan_tree(as_planned(tree, self.plan), devices, self.plan.device)
            # a run without a cluster would have this plan again
            return plan if origin.target else fixed(plan)

        request = PlanRequest.again(origin, self.plan.device)
        written = as_written(origin.graph, origin.overrides)
        work = measured_work(origin.target, lines, self.prompt_tokens)
        scenario = Scenario(self.cluster, work, self.calibrated(lines))
        chosen = chosen_settings(self.plan)
        return Evaluator(request, written, make_plan, origin.devices, scenario, chosen)

    def calibration(self) -> str:
        """Return a YAML text of this run's calibration of the cost model.

        Raises:
            RunError: it has fewer than two iterations.
        """
        timed = [line for line in read_metrics(self.run_dir) if "time/step" in line]
        if len(timed) < 2:
            law = f"{self.run_dir} has too few iterations to calibrate on: {len(timed)}"
            raise RunError(f"{law}\n  the first warms up: run two or more")
        lines = timed[1:]
        written = (self.run_dir / METRICS).stat().st_mtime
        date = datetime.fromtimestamp(written, UTC).date().isoformat()
        devices = sum(self.plan.pools.values())
        devices_text = f"{devices} {plural('device', devices)}"
        iterations = f"{lines[0]['step']} to {lines[-1]['step']}"
        work = self.work(lines)
        source = "measured" if prompt_tokens(lines) else "taken"
        prompts = f"prompts of {work.prompt:,.1f} tokens ({source})"
        notes = [
            f"{self.run_dir}: {self.plan.graph}, iterations {iterations}, {date}",
            f"on {devices_text} of {self.cluster.cluster}, {prompts}, "
            f"responses of {work.responses.mean:,.1f}",
            "measured seconds over the middle of the prediction, of each step in each iteration:",
            "10th and 90th percentile",
        ]
        name = f"{self.plan.graph} on {self.cluster.cluster}, {date}"
        return calibration_text(name, notes, self.ratios(lines))
