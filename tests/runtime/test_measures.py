"""What a line of metrics.jsonl says: evaluations by source, times, rates, memory, utilisation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.compiler import compile_graph
from rlgraph.costs.model_size import size_of
from rlgraph.ir.plan import Step
from rlgraph.ops import Metric
from rlgraph.runtime.driver.iteration import FinishedStep
from rlgraph.runtime.driver.metrics import metrics, performance, times, utilisation
from rlgraph.runtime.messages.report import Report, Usage
from rlgraph.runtime.messages.tasks import Task
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.worker import Worker

ONES = str(Path(__file__).parent / "ones.yaml")
BY_SOURCE = """graph: by_source
extends: ONES
edits:
  - set:
      eval.nodes.prompts: {files: {first: [test.jsonl], second: [more.jsonl]}, batch: all}
      eval.nodes.rollout: {n: 3, temperature: 1.0}
      eval.nodes.solved: {op: metric.pass_at_k, k: 2, threshold: 0}
      eval.nodes.average: {op: metric.mean_at_k}
      eval.nodes.cut_off: {op: metric.mean_at_k, in: {rewards: truncated}}
      eval.report: {"pass@2": solved, mean@3: average, truncated: cut_off}
      schedule.iterations: 1
"""
pytestmark = pytest.mark.usefixtures("in_demo")


def test_an_evaluation_reports_each_source_and_keeps_rows_and_weights_apart() -> None:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(10, 15)]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    Path("graph.yaml").write_text(BY_SOURCE.replace("ONES", ONES))
    run_graph("graph.yaml", (), 1, run_dir=Path("run"), inline=True)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        for metric in ("pass@2", "mean@3", "truncated"):
            first, second = (line[f"eval/{metric}/{name}"] for name in ("first", "second"))
            assert line[f"eval/{metric}"] == pytest.approx((5 * first + 2 * second) / 7)
    assert lines[0]["eval/pass@2"] > lines[0]["eval/mean@3"] > 0
    line = lines[1]
    assert line["rollout/prompt_length"] == 6
    samples = 28
    tokens = samples * (line["rollout/prompt_length"] + line["rollout/length"])
    assert line["perf/tokens_per_second"] == pytest.approx(tokens / line["time/step"])
    assert line["perf/tokens_per_second/update_policy"] == pytest.approx(tokens / line["time/update_policy"])
    generated = line["tokens/generated"] / line["time/rollout"]
    assert line["perf/generated_per_second"] == pytest.approx(generated)
    assert line["perf/memory/main-0"] > 2**26, "torch alone takes more"
    assert not [name for name in line if "mfu" in name], "a CPU has no peak"


JUDGED = """graph: judged
extends: ppo
edits:
  - set: {prompts.tokenizer: policy}
  - add: {models.judge: {path: judge, frozen: true}}
  - replace: {rewards: {op: reward.judge, model: judge, prompt: "Is {response} right?"}}
"""
PLAN = compile_graph("ppo", ("prompts.files=[a.jsonl]",), 2)
STEPS = {step.node: step for step in PLAN.steps}


def ran(step: Step, *spans: tuple[float, float], **more: Any) -> FinishedStep:
    return FinishedStep(step, {("main", d): Report(*span, **more) for d, span in enumerate(spans)})


def test_a_steps_time_is_its_longest_device_unless_they_work_together() -> None:
    spans = (1.0, 2.5), (3.0, 5.0)
    found = times(PLAN, [ran(STEPS[name], *spans) for name in ("rollout", "update_policy", "sync:policy")])
    assert found == {"time/rollout": 2.0, "time/update_policy": 4.0, "time/sync:policy": 4.0}
    sync = STEPS["sync:policy"]
    apart = replace(sync, action=replace(sync.action, source="other"))
    assert times(PLAN, [ran(apart, *spans)]) == {"time/sync:policy": 2.0}


def test_means_are_over_devices_and_sums_stay_sums() -> None:
    values = {
        "reward/mean": Metric.of("mean", [1.0, 2.0], "samples"),
        "tokens/generated": Metric.of("sum", [5.0], "tokens"),
    }
    found = metrics([ran(STEPS["rewards"], (0, 1), (0, 1), metrics=values)])
    assert found == {"reward/mean": 1.5, "tokens/generated": 10.0}


def test_utilisation_counts_the_models_operations(demo_files: Path) -> None:
    path = str(demo_files / "demo_files/model")
    models = {name: replace(model, path=path) for name, model in PLAN.models.items()}
    plan, gpu = replace(PLAN, models=models), "NVIDIA H100 80GB HBM3"
    used = [Usage(1, gpu, tokens=100.0, squares=2000.0), Usage(2, gpu, tokens=60.0, squares=900.0)]
    size = size_of(path)
    forward = 2 * size.multiplied * 160 + size.attention_flops(1) * 2900
    peak = 2 * 67e12
    once = utilisation(plan, STEPS["old_logprobs"], used, 0.5)
    assert once == pytest.approx(forward / (peak * 0.5))
    assert utilisation(plan, STEPS["update_policy"], used, 0.5) == pytest.approx(3 * forward / (peak * 0.5))
    item = FinishedStep(
        STEPS["old_logprobs"],
        {("main", d): Report(0.0, 0.5, used=one) for d, one in enumerate(used)},
    )
    found = performance(plan, [item], {"time/step": 1.0, "time/old_logprobs": 0.5})
    assert found == {
        "perf/tokens_per_second/old_logprobs": 320.0,
        "perf/mfu/old_logprobs": once,
        "perf/memory/main-0": 1.0,
        "perf/memory/main-1": 2.0,
        "perf/memory_step/old_logprobs": 2.0,
    }


def test_the_rate_of_generation_is_that_of_rollouts_without_the_time_of_a_judge() -> None:
    Path("judged.yaml").write_text(JUDGED)
    plan = compile_graph("judged.yaml", ("prompts.files=[a.jsonl]",), 1)
    steps = {step.node: step for step in plan.steps}
    generated = {"tokens/generated": Metric.of("sum", [100.0], "tokens")}
    every = [ran(steps["rollout"], (0.0, 2.0), metrics=generated), ran(steps["rewards"], (2.0, 10.0))]
    found = performance(plan, every, {"time/step": 10.0, **metrics(every)})
    assert found["perf/generated_per_second"] == 50


class Card:
    """Stands in for ``torch.cuda``'s memory functions: tensors of one process, and a server beside it.

    It notes NVTX ranges that begin, and "end".
    """

    name, total, server = "NVIDIA H100 80GB HBM3", 80, 7
    held = most = reserved = 0

    def __init__(self) -> None:
        self.ranges: list[str] = []

    def hold(self, size: int) -> None:
        """Tensors take so much more, or less. Torch keeps what they leave."""
        self.held += size
        self.most, self.reserved = max(self.most, self.held), max(self.reserved, self.held)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def reset() -> None:
            self.most = self.held

        said = {
            "reset_peak_memory_stats": reset,
            "max_memory_allocated": lambda: self.most,
            "max_memory_reserved": lambda: self.reserved,
            "mem_get_info": lambda: (self.total - self.reserved - self.server, self.total),
            "get_device_name": lambda: self.name,
        }
        for name, function in said.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self.ranges.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.ranges.append("end"))


class Holder(Worker):
    """A worker whose step ``peak`` holds some memory for a time, and keeps some of it."""

    def peak(self, card: Card, most: int, kept: int) -> Report:
        card.hold(most)
        card.hold(kept - most)
        return Report(0.0, 1.0)


def test_memory_on_a_gpu_is_that_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    card, worker = Card(), Holder()
    card.install(monkeypatch)
    worker.device = "cuda"
    tasks = [Task("peak", (card, most, kept)) for most, kept in ((50, 20), (5, 0))]
    reports = worker.perform(tasks, ())
    found = [(one.used.memory, one.used.reserved, one.used.device) for one in reports]
    assert found == [(50, 50, 57), (25, 50, 57)], "the second step's most is its own"
    assert card.ranges == ["peak", "end"] * 2
    items = [
        FinishedStep(STEPS[name], {("main", 0): report})
        for name, report in zip(("update_policy", "old_logprobs"), reports, strict=True)
    ]
    assert performance(PLAN, items, {"time/step": 1.0}) == {
        "perf/memory/main-0": 50.0,
        "perf/memory_reserved/main-0": 50.0,
        "perf/memory_used/main-0": 57.0,
        "perf/memory_step/update_policy": 50.0,
        "perf/memory_step/old_logprobs": 25.0,
    }


def test_the_memory_of_a_process_beside_a_device_is_not_the_devices() -> None:
    item = ran(STEPS["rewards"], (0.0, 1.0), used=Usage(3), off_device=True)
    assert performance(PLAN, [item], {"time/step": 1.0}) == {}
