"""How far is the cost model from phases that others measured? See docs/cost_model.md.

    python benchmarks/published.py

The formulas and constants are those of ``rlgraph plan --cluster``. What a report leaves open is taken alike
for all rows: see ``Run``. The mean response length of the H20 runs is not known: they are shown with the rule
of ``rlgraph plan`` (half of the maximum), and with the one length at which the middle of the predicted
log-prob pass of one configuration, 64 x H20, is the measured one. That cell then says nothing; the others do.

Last, the model is calibrated on that same configuration, one factor a phase, and held against the others:
nothing is fitted to any of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from rlgraph.compiler import plan_tree
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST, WORST, Rates
from rlgraph.costs.formulas import (
    Tokens,
    decode_seconds,
    prefill_seconds,
    score_seconds,
    sync_seconds,
    update_seconds,
)
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.model_size import size_of
from rlgraph.costs.workload import Lengths, Workload
from rlgraph.frontend.compose import compose
from rlgraph.planning.auto_settings import in_flight
from rlgraph.planning.predict import Scenario, laid_out

# Hosts of eight H20. Operations, memory, bandwidth, NVLink: NVIDIA's figures; the adapter as for the H100.
H20 = Cluster(
    cluster="h20",
    hosts=16,
    devices=8,
    memory=96e9,
    bf16_flops=148e12,
    fp32_flops=44e12,
    memory_bandwidth=4.0e12,
    intra_link=450e9,
    inter_link=50e9,
    reserve=3.9e9,
)


@dataclass(frozen=True)
class Run:
    """One published run. Below the line: not published, and so the same for every run.

    Nor is it published how much of the memory is for keys and values: that is what ``rlgraph plan`` settles.
    """

    name: str
    model: str
    cluster: Cluster
    devices: int
    prompts: int
    n: int
    responses: Lengths
    measured: Mapping[str, float]
    # ---
    prompt: float = 256
    micro_tokens: int = 16384
    minibatches: int = 16
    recomputed: float = 4  # activation checkpointing: 8 N FLOPs a token
    references: int = field(default=0)  # log-prob passes of a frozen model

    @property
    def work(self) -> Workload:
        rows = {"samples": float(self.prompts * self.n)}
        return Workload(rows, self.prompt, 2 * self.prompt, self.responses, ())

    def phases(self, grade: int) -> dict[str, float]:
        """Seconds of each phase at one grade."""
        size = size_of(self.model)
        rates = Rates(self.cluster, self.devices, "bfloat16", grade)
        alone = Rates(self.cluster, 1, "bfloat16", grade)
        rows = self.prompts * self.n / self.devices
        slots = in_flight_of(self)
        generation = prefill_seconds(size, alone, rows / self.n, self.prompt)
        generation += decode_seconds(size, alone, rows, slots, self.prompt, self.responses, graphs=True)
        score = score_seconds(size, rates, self.tokens(1))
        trained = self.tokens(self.minibatches)
        found = {
            "generation": generation,
            "old log-probs": score,
            "update": update_seconds(size, rates, trained, self.minibatches, self.recomputed),
            "references": self.references * score,
            "sync": sync_seconds(size, rates, 2),
        }
        return {**found, "step": sum(found.values())}

    def tokens(self, minibatches: int) -> Tokens:
        """What the busiest device computes, as ``rlgraph.costs.pricing`` has it."""
        rows = self.prompts * self.n / minibatches
        longest = self.work.longest(rows)
        tokens = max(rows * self.work.mean / self.devices, longest)
        passes = minibatches * math.ceil(tokens / max(self.micro_tokens, longest))
        return Tokens(tokens * minibatches, tokens / self.work.mean * self.work.square * minibatches, passes)


def in_flight_of(run: Run) -> int:
    """Samples that an engine has in flight, with the cache that ``rlgraph plan`` settles for the like."""
    given = (
        f"models.policy.path={run.model}",
        f"prompts.batch={run.prompts}",
        f"rollout.n={run.n}",
        f"rollout.max_new_tokens={int(run.responses.longest)}",
    )
    graph = "grpo" if run.references else "dr_grpo"
    return _in_flight(graph, given, run.cluster, run.devices, run.prompt, run.responses.mean)


@cache
def _in_flight(
    graph: str, given: tuple[str, ...], cluster: Cluster, devices: int, prompt: float, response: float
) -> int:
    plan = plan_tree(compose(graph, given), devices, cluster.device)
    footprint, _ = laid_out(plan, Scenario(cluster, {"prompt_tokens": prompt, "response_tokens": response}))
    (step,) = (step for step in footprint.plan.steps if step.node == "rollout")
    return in_flight(footprint, step)[0]


QWEN = "Qwen/Qwen2.5-Math-7B"
LONGEST = 28 * 1024
PHASES = ("step", "generation", "old log-probs", "update")
RULE = Lengths(LONGEST / 2, LONGEST)
RUNS = tuple(
    Run(
        f"7B DAPO, {devices} x H20",
        QWEN,
        H20,
        devices,
        512,
        16,
        RULE,
        dict(zip(PHASES, seconds, strict=True)),
    )
    for devices, seconds in {
        32: (790, 357, 108, 270),
        64: (365, 151, 70, 133),
        128: (356, 178, 54, 114),
    }.items()
)
BASE = RUNS[1]  # 64 devices: the one configuration that anything is fitted to
LLAMA = Run(
    "8B GRPO, 16 x H100",
    "meta-llama/Llama-3.1-8B",
    load_cluster("h100-64"),
    16,
    64,
    32,
    Lengths(1019 - 256, 4096),  # the mean is that of prompt and response; the maximum is not published
    {"step": 92.8},
    references=1,
)


def middle(run: Run, phase: str) -> float:
    """The geometric middle of a predicted range, in seconds."""
    return math.sqrt(run.phases(BEST)[phase] * run.phases(WORST)[phase])


def of_length(run: Run, mean: float) -> Run:
    """The run with another mean response length."""
    return replace(run, responses=Lengths(mean, run.responses.longest))


def inferred_length(run: Run, phase: str = "old log-probs") -> float:
    """The mean response length at which the predicted middle of a phase is the measured time."""
    low, high = 16.0, run.responses.longest
    for _ in range(40):
        mean = (low + high) / 2
        low, high = (mean, high) if middle(of_length(run, mean), phase) < run.measured[phase] else (low, mean)
    return low


def factors(run: Run) -> dict[str, float]:
    """Measured over predicted, of each phase: one calibration."""
    found = {phase: run.measured[phase] / middle(run, phase) for phase in PHASES if phase != "step"}
    return {**found, "references": found["old log-probs"], "sync": 1.0}


def calibrated(run: Run, by: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase with these factors."""
    found = {phase: factor * middle(run, phase) for phase, factor in by.items()}
    return {**found, "step": sum(found.values())}


def held_out(mean: float) -> Iterator[tuple[str, str, float, float]]:
    """Calibrated on ``BASE``: run, phase, measured and predicted seconds of all others."""
    by = factors(of_length(BASE, mean))
    for run in (*(of_length(run, mean) for run in RUNS if run is not BASE), LLAMA):
        for phase, seconds in run.measured.items():
            yield run.name, phase, seconds, calibrated(run, by)[phase]


def show_held_out(mean: float) -> None:
    by = factors(of_length(BASE, mean))
    said = ", ".join(f"{phase} x {by[phase]:.2f}" for phase in PHASES if phase != "step")
    print(f"\ncalibrated on {BASE.name} with responses of {mean:,.0f} tokens: {said}")
    print(f"  {'held out':<22}{'phase':<15}{'measured':>9}{'predicted':>12}{'ratio':>8}  error")
    for name, phase, measured, seconds in held_out(mean):
        ratio = seconds / measured
        print(f"  {name:<22}{phase:<15}{measured:>7.1f} s{seconds:>10.1f} s{ratio:>8.2f}  {ratio - 1:+.0%}")


def rows(run: Run) -> Iterator[tuple[str, float, float, float, float]]:
    """For each phase: its name, measured, predicted at best and at worst, middle over measured."""
    best, worst = run.phases(BEST), run.phases(WORST)
    for phase, measured in run.measured.items():
        yield phase, measured, best[phase], worst[phase], middle(run, phase) / measured


def show(title: str, runs: tuple[Run, ...]) -> None:
    print(f"{title}\n  {'run':<22}{'phase':<15}{'measured':>9}{'predicted':>20}{'ratio':>8}  inside")
    for run in runs:
        for phase, measured, best, worst, ratio in rows(run):
            inside = "yes" if best <= measured <= worst else "no"
            predicted = f"{best:,.0f} to {worst:,.0f}"
            print(f"  {run.name:<22}{phase:<15}{measured:>7.1f} s{predicted:>18} s{ratio:>8.2f}  {inside}")


def main() -> None:
    show(f"responses of half the maximum, {RULE.mean:,.0f} tokens (the rule of rlgraph plan)", RUNS)
    mean = inferred_length(BASE)
    inferred = tuple(of_length(run, mean) for run in RUNS)
    show(f"\nresponses of {mean:,.0f} tokens (inferred from the log-prob pass on 64 devices)", inferred)
    show("\nwith the published mean length", (LLAMA,))
    show_held_out(mean)
    show_held_out(RULE.mean)


if __name__ == "__main__":
    main()
