"""The figures that one decides by: each by hand, and the same wherever they are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.model_size import size_of
from rlgraph.ir.plan import Plan, Target
from rlgraph.ir.prediction import Figure, Headline
from rlgraph.printing.headline import headline
from rlgraph.reports.plan_file import parse
from rlgraph.units import seconds_text
from rlgraph.view.contents import contents
from rlgraph.view.subject import Subject
from rlgraph.view.terminal import terminal_text

SEVEN = "models.policy.path=Qwen/Qwen2.5-7B"
EVAL = "eval={nodes: {prompts: {batch: %s}, rollout: {n: 1}}, report: {accuracy: rewards}, every: 20}"


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def told(plan: Plan) -> Headline:
    assert plan.predicted and plan.predicted.headline
    return plan.predicted.headline


def on(graph: str, *settings: str, cluster: str = "h100-8") -> Plan:
    return compile_graph(graph, settings, target=Target(cluster))


def with_disk(folder: Path, rate: float) -> str:
    path = folder / "disk.yaml"
    path.write_text((FOLDER / "h100-8.yaml").read_text() + f"disk: {rate}\n")
    return str(path)


def test_by_hand() -> None:
    plan = on("grpo", SEVEN, "schedule.iterations=100")
    said, seconds = told(plan), plan.predicted and plan.predicted.seconds
    assert seconds and (said.iteration.low, said.iteration.high) == pytest.approx(seconds)
    assert said.iteration.value == pytest.approx((seconds[0] * seconds[1]) ** 0.5)
    assert said.run and said.device_hours
    assert said.run.low == pytest.approx(100 * seconds[0])
    assert said.device_hours.high == pytest.approx(100 * seconds[1] * 8 / 3600)
    assert said.tokens.low == pytest.approx(1024 * (256 + 512) / seconds[1] / 8)  # 128 prompts, 8 samples
    update = next(step for step in plan.steps if step.updated)
    assert update.seconds
    # tokens alone; attention adds little to rows of 768 tokens
    flops = 6 * size_of("Qwen/Qwen2.5-7B").multiplied * 1024 * 768
    share = flops / (8 * 989e12 * update.seconds[0])
    assert share < said.utilisation["update_policy"].high < 1.05 * share
    assert 0.3 < sum(said.limits.values()) <= 1 and list(said.limits.values()) == sorted(
        said.limits.values(), reverse=True
    )


def test_evaluations_are_in_the_time() -> None:
    without, small, large = (
        told(on("grpo", SEVEN, "schedule.iterations=50", *more)) for more in ((), [EVAL % 64], [EVAL % 512])
    )
    assert small.evaluation and large.evaluation and small.run and large.run and without.run
    assert without.evaluation is None and small.evaluation.low < large.evaluation.low
    # before the first, after 20 and 40, and at the end
    assert small.run.low - without.run.low == pytest.approx(4 * small.evaluation.low, rel=1e-4)
    unknown = told(on("grpo", SEVEN, EVAL % "all"))
    assert unknown.evaluation is None and "`prompts` gives is known when its files" in " ".join(
        unknown.left_out
    )


def test_checkpoints_are_in_the_time_where_the_disk_is_known(tmp_path: Path) -> None:
    settings = (SEVEN, "schedule.iterations=50", "schedule.save_every=20")
    without = told(on("grpo", *settings))
    assert without.checkpoint is None and "`disk`" in " ".join(without.left_out)
    slow = told(on("grpo", *settings, cluster=with_disk(tmp_path, 2e8)))
    size = size_of("Qwen/Qwen2.5-7B").parameters
    assert slow.checkpoint and slow.run and without.run
    assert slow.checkpoint.value == pytest.approx(12 * size / 2e8, rel=1e-3)
    assert slow.run.high - without.run.high == pytest.approx(3 * slow.checkpoint.value, rel=1e-3)
    # at best an iteration hides as much of each but the last
    hidden = 2 * min(slow.checkpoint.value, slow.iteration.low)
    assert slow.run.low - without.run.low == pytest.approx(3 * slow.checkpoint.value - hidden, rel=1e-3)
    every = told(on("grpo", *settings, "schedule.restarts=1", cluster=with_disk(tmp_path, 2e8)))
    assert every.run and every.run.low - without.run.low == pytest.approx(
        50 * slow.checkpoint.value, rel=1e-3
    )


def test_what_comes_by_the_clock_is_counted_by_the_iterations_that_it_takes(tmp_path: Path) -> None:
    length, cluster = (SEVEN, "schedule.iterations=50"), with_disk(tmp_path, 2e8)
    without = told(on("grpo", *length, "schedule.save_every=0", cluster=cluster))
    assert without.checkpoint
    interval = f"schedule.save_every={12.5 * without.iteration.high:.3f} s"  # four times at worst
    by_clock = told(on("grpo", *length, interval, cluster=cluster))
    assert by_clock.run and without.run
    more = by_clock.run.high - without.run.high
    assert more == pytest.approx(3 * without.checkpoint.value, rel=1e-3), "the last is at the end anyway"
    by_epoch = told(on("grpo", *length, "schedule.save_every=1 epoch", cluster=cluster))
    assert by_epoch.run == without.run
    assert "checkpoints on the way: how many iterations 1 epoch of prompts are" in " ".join(by_epoch.left_out)
    best = (*length, EVAL % 100, "schedule.save_every=0")
    plain = told(on("grpo", *best, cluster=cluster))
    chosen = told(on("grpo", *best, "schedule.best={metric: eval/accuracy, mode: max}", cluster=cluster))
    assert plain.run and chosen.run and chosen.run.low == plain.run.low
    # at worst both evaluations on the way are the best so far
    assert chosen.run.high - plain.run.high == pytest.approx(2 * without.checkpoint.value, rel=1e-3)


def test_the_pipeline_fills_before_each_stretch() -> None:
    once, often = (
        told(on("decoupled_ppo", f"schedule.save_every={n}", "schedule.iterations=100")) for n in (0, 10)
    )
    assert once.run and often.run
    fill = (often.run.low - once.run.low) / 9
    assert 0 < fill < 2 * once.iteration.low
    assert once.run.low == pytest.approx(100 * once.iteration.low + fill, rel=1e-3)


def test_what_is_not_known_is_left_out() -> None:
    said = told(on("grpo", SEVEN, "schedule={epochs: 2}"))
    assert said.run is None and said.device_hours is None
    assert any("epochs" in words for words in said.left_out)


def test_rows_of_data_count_where_nothing_is_sampled() -> None:
    said = told(on("sft"))
    assert said.tokens.value > 0 and not on("sft").predicted.in_flight  # type: ignore[union-attr]


def test_it_is_the_same_everywhere(tmp_path: Path) -> None:
    args = ("grpo", SEVEN, "--cluster", "h100-8")
    plan = on("grpo", SEVEN)
    figures = headline(plan)
    lines = [" ".join(f"{label} {said}".split()) for label, said in figures.items()]
    brief = call("plan", *args, "--brief").output
    for text in (brief, call("plan", *args).output):
        assert all(line in " ".join(text.split()) for line in lines)
    flat = " ".join(terminal_text(plan).split())
    assert lines[0] in flat and f"an iteration of the steady state: {figures['iteration']}" in flat
    assert contents(Subject(plan, compiled=True))["headline"][1] == figures
    data = json.loads(call("plan", *args, "--format", "json").output)["predicted"]["headline"]
    assert data == json.loads(call("plan", *args, "--brief", "--format", "json").output)
    assert data["iteration"]["value"] == told(plan).iteration.value
    assert figures["iteration"].startswith(seconds_text(data["iteration"]["value"]))
    assert parse(plan.json()) == plan


def test_a_report_says_what_was_planned(tmp_path: Path) -> None:
    plan = replace(on("grpo", SEVEN), origin=None)  # what would help is then not computed
    (tmp_path / "plan.json").write_text(plan.json())
    took = {f"time/{step.node}": 1.0 for step in plan.steps}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/step": 13.0, **took}) + "\n")
    said = call("report", str(tmp_path)).output
    assert all(" ".join(text.split()) in " ".join(said.split()) for text in headline(plan).values())


def test_brief_is_of_a_plan_for_a_cluster() -> None:
    assert call("plan", "grpo", "--devices", "8", "--brief").exit_code == 2
    assert call("plan", "grpo", "--cluster", "h100-8", "--brief", "--format", "mermaid").exit_code == 2


def test_hours_are_hours() -> None:
    assert [seconds_text(n) for n in (7199, 7200, 200_000)] == ["120 min", "2 h", "2.31 days"]
    assert Figure.of((8.0, 2.0)) == Figure(4.0, 2.0, 8.0)
    assert load_cluster("h100-8").disk is None


def test_the_one_that_the_docs_show() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cost_model.md").read_text()
    command, _, shown = text.partition("\n$ rlgraph ")[2].partition("```")[0].partition("\n")
    assert call(*command.split()).output == shown
