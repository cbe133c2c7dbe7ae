"""A run's steps, predicted beside measured, from the plan and the metrics in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlgraph.calibrate import TICK, calibration_text, work_of
from rlgraph.cluster import Cluster, load_cluster
from rlgraph.errors import RunError
from rlgraph.plan import Plan
from rlgraph.planfile import load
from rlgraph.predict import Pricing, sizes_of
from rlgraph.sizes import Size
from rlgraph.workload import Workload, workload

Line = Mapping[str, Any]
SAY = "say what it ran on: --cluster NAME_OR_FILE"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What a run recorded: a line an iteration, and one for step 0 where it was evaluated.

    Raises:
        RunError: the folder holds no metrics.
    """
    text = _file(run_dir, "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _file(run_dir: Path, name: str) -> Path:
    path = run_dir / name
    if not path.is_file():
        raise RunError(f"{run_dir} holds no run: there is no {path}")
    return path


def counted(lines: Sequence[Line]) -> list[Line]:
    """The iterations that were timed, but the first, which warms up; that one where there is no other."""
    timed = [line for line in lines if "time/step" in line]
    return timed[1:] or timed


def response_tokens(lines: Sequence[Line]) -> float | None:
    """The mean tokens of a response over iterations; None where nothing was generated."""
    return _mean(lines, "rollout/length")


def prompt_tokens(lines: Sequence[Line]) -> float | None:
    """The mean tokens of a prompt over iterations; None where nothing was generated."""
    return _mean(lines, "rollout/prompt_length")


def _mean(lines: Sequence[Line], name: str) -> float | None:
    found = [line[name] for line in lines if name in line]
    return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class Priced:
    """The plan of a run, the cluster that it ran on, and the mean of its prompts if one was given."""

    run_dir: Path
    plan: Plan
    cluster: Cluster
    prompt_tokens: float | None

    @staticmethod
    def of(run_dir: Path, cluster: str | None = None, prompt_tokens: float | None = None) -> Priced:
        """That of a folder; what is not given is taken as it was planned.

        Raises:
            RunError: there is no run; or it was planned for no cluster and none is given; or that is smaller.
            GraphError: its plan is none that this rlgraph wrote; or the cluster or a model is not known.
        """
        plan = load(_file(run_dir, "plan.json"))
        target = plan.origin.target if plan.origin else None
        if cluster is None and target is None:
            raise RunError(f"{run_dir} was planned for no cluster\n  {SAY}")
        found = load_cluster(cluster or (target.cluster if target else ""))
        planned = plan.predicted.cluster if plan.predicted else found.cluster
        if cluster is None and planned != found.cluster:
            law = f"{run_dir} was planned for {planned}; that name is {found.cluster} here and now"
            raise RunError(f"{law}\n  {SAY}")
        devices = sum(plan.pools.values())
        if devices > found.total:
            raise RunError(f"{run_dir} ran on {devices} devices; {found.cluster} has {found.total}")
        return Priced(run_dir, plan, found, prompt_tokens or (target.prompt_tokens if target else None))

    def work(self, lines: Sequence[Line]) -> Workload:
        """What these iterations worked on: prompts and responses as long as they were."""
        target = self.plan.origin.target if self.plan.origin else None
        planned = target.response_tokens if target else None
        prompt = prompt_tokens(lines) or self.prompt_tokens
        return workload(self.plan, prompt, response_tokens(lines) or planned)

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """Of the models."""
        return sizes_of(self.plan)

    def priced(self, lines: Sequence[Line]) -> Plan:
        """The plan with what the model, not calibrated, says of these iterations."""
        pricing = Pricing(self.plan, self.cluster, self.work(lines), self.sizes)
        steps = tuple(map(pricing.priced, self.plan.steps))
        peak = pricing.footprint.peaks()
        return replace(self.plan, steps=steps, predicted=pricing.prediction(steps), peak=peak)

    def ratios(self, lines: Sequence[Line]) -> dict[str, dict[str, list[float]]]:
        """Kind of work -> step -> measured over the middle of the predicted seconds, of each iteration.

        Each iteration is held against a prediction for the mean length of its own responses: the ratio is one
        of rates.
        """
        found: dict[str, dict[str, list[float]]] = {}
        for line in lines:
            pricing = Pricing(self.plan, self.cluster, self.work([line]), self.sizes)
            for step in self.plan.steps:
                measured = line.get(f"time/{step.node}")
                if measured is not None:
                    ratio = max(measured, TICK) / pricing.middle(step)
                    found.setdefault(work_of(step), {}).setdefault(step.node, []).append(ratio)
        return found

    def calibration(self) -> str:
        """The YAML text of what this run says about the cost model.

        Raises:
            RunError: it has fewer than two iterations.
        """
        timed = [line for line in read_metrics(self.run_dir) if "time/step" in line]
        if len(timed) < 2:
            law = f"{self.run_dir} has too few iterations to calibrate on: {len(timed)}"
            raise RunError(f"{law}\n  the first warms up: run two or more")
        when = (self.run_dir / "metrics.jsonl").stat().st_mtime
        date = datetime.fromtimestamp(when, UTC).date().isoformat()
        first, last = timed[1]["step"], timed[-1]["step"]
        notes = [
            f"{self.run_dir}: {self.plan.graph}, iterations {first} to {last}, {date}",
            f"on {_devices(self.plan)} of {self.cluster.cluster}, {self._tokens(timed[1:])}",
            "measured seconds over the middle of the prediction, of each step in each iteration:",
            "10th and 90th percentile",
        ]
        name = f"{self.plan.graph} on {self.cluster.cluster}, {date}"
        return calibration_text(name, notes, self.ratios(timed[1:]))

    def _tokens(self, lines: Sequence[Line]) -> str:
        work, known = self.work(lines), prompt_tokens(lines)
        prompts = f"prompts of {work.prompt:,.1f} tokens ({'measured' if known else 'taken'})"
        return f"{prompts}, responses of {work.responses.mean:,.1f}"


def middle(seconds: tuple[float, float]) -> float:
    """The geometric mean of best and worst."""
    return math.sqrt(seconds[0] * seconds[1])


def _devices(plan: Plan) -> str:
    count = sum(plan.pools.values())
    return f"{count} device" + "s" * (count != 1)
