"""`rlgraph report`: what a run waited for, what was idle and held, and which change would have helped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.workload import workload
from rlgraph.ir.plan import Plan, Target
from rlgraph.planning.simulate import critical_path
from rlgraph.reports.measured import Priced, counted, read_metrics
from rlgraph.reports.report import make_report, report_text, single_changes_of
from rlgraph.reports.stages import bottleneck, stages
from rlgraph.search.faster import LEAST_SAVING
from rlgraph.units import middle

PROMPT, LENGTHS = 200.0, (500.0, 600.0, 550.0)
SPLIT = ("pools={train: {devices: 4}, gen: {devices: 4}}", "schedule.buffer={staleness: 1, by: batch}")
AHEAD = (*SPLIT, "nodes.update_policy.in.old_logprobs=rollout_logprobs")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def a_run(*settings: str, factor: float = 1.5, memory: float = 6e10) -> tuple[Path, Plan]:
    """A run of grpo on h100-8 whose every step took ``factor`` of the middle of its prediction."""
    plan = compile_graph("grpo", settings, None, Target("h100-8", PROMPT))
    folder = Path("run")
    folder.mkdir()
    (folder / "plan.json").write_text(plan.json())
    lines = []
    for number, length in enumerate(LENGTHS):
        pricing = Pricing(plan, load_cluster("h100-8"), workload(plan, PROMPT, length), sizes_of(plan))
        took = {f"time/{step.node}": factor * pricing.middle(step) for step in plan.steps}
        work = {"rollout/length": length, "rollout/prompt_length": PROMPT, "time/step": sum(took.values())}
        held = {f"perf/memory/main-{device}": memory - device for device in range(8)}
        lines.append(json.dumps({"step": number + 1, **work, **took, **held}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder, plan


def look_no_further(folder: Path, plan: Plan) -> None:
    """Let the run's plan not say what it was made from: what would help is then not computed."""
    (folder / "plan.json").write_text(replace(plan, origin=None).json())


def seconds(plan: Plan, named: Mapping[str, float]) -> dict[int, float]:
    return {step.id: named.get(step.node, 0.0) for step in plan.steps}


def chain(plan: Plan, named: Mapping[str, float]) -> dict[str, float]:
    return {link.step: link.seconds for link in critical_path(plan, seconds(plan, named)) if link.seconds}


# -- the critical path, by hand


def test_in_one_pool_it_is_every_step() -> None:
    plan = compile_graph("grpo", (), 1)
    took = {"rollout": 4.0, "old_logprobs": 1.0, "ref_logprobs": 1.5, "update_policy": 3.0}
    assert chain(plan, took) == took


def test_what_runs_beside_a_device_takes_nothing_from_what_is_outside_the_steps() -> None:
    plan = compile_graph("grpo", (), 1)
    took = {"rollout": 4.0, "rewards": 3.0, "old_logprobs": 1.0, "ref_logprobs": 1.5, "update_policy": 3.0}
    Path("run").mkdir()
    look_no_further(Path("run"), plan)
    line = {"step": 1, "time/step": 11.5, **{f"time/{node}": seconds for node, seconds in took.items()}}
    Path("run/metrics.jsonl").write_text(json.dumps(line) + "\n")
    report = make_report(Path("run"))
    assert report.outside  # the reward's last half second is waited for
    assert report.outside.measured == pytest.approx(11.5 - 4.0 - 3.0 - 3.0)


def test_with_generation_ahead_it_is_the_busier_pool() -> None:
    plan = compile_graph("grpo", AHEAD, 8)
    assert chain(plan, {"rollout": 4.0, "ref_logprobs": 1.5, "update_policy": 7.0}) == {
        "ref_logprobs": 1.5,
        "update_policy": 7.0,
    }
    assert chain(plan, {"rollout": 40.0, "ref_logprobs": 1.5, "update_policy": 7.0}) == {"rollout": 40.0}


def test_what_another_pool_finishes_sooner_is_off_it() -> None:
    pools = "pools={train: {devices: 4}, score: {devices: 4}}"
    plan = compile_graph("ppo", (pools, "models.ref.train.pool=score"), 8)
    both = {"rollout": 4.0, "old_logprobs": 2.0, "values": 2.0, "update_policy": 3.0}
    found = chain(plan, {**both, "ref_logprobs": 1.0})
    assert "ref_logprobs" not in found and found["values"] == 2
    assert chain(plan, {**both, "ref_logprobs": 9.0})["ref_logprobs"] == 9


# -- what would help


@pytest.mark.slow
def test_what_is_told_is_what_the_planner_says_of_the_edited_graph() -> None:
    """Of a calibrated run: the same seconds as a plan with the edits and the factors."""
    wide = "models.policy.train.dtype=float32"
    folder, _ = a_run(wide)
    priced, lines = Priced.of(folder), counted(read_metrics(folder))
    found = single_changes_of(priced, lines)
    whole = sum(line["time/step"] for line in lines) / len(lines)
    assert middle(found.seconds) == pytest.approx(whole, rel=0.02), "calibrated, it foretells the run itself"
    assert [change.saves for change in found.changes] == sorted(
        (c.saves for c in found.changes), reverse=True
    )
    Path("f.yaml").write_text(priced_calibration := priced.calibration())
    assert "update: [1.5, 1.5]" in priced_calibration
    best = found.changes[0]
    again = compile_graph(
        "grpo", (wide, *best.edits), None, Target("h100-8", PROMPT, 575, "f.yaml")
    ).predicted
    assert again and middle(again.seconds) == pytest.approx(middle(best.seconds), rel=0.01)
    assert best.saves == pytest.approx(1 - middle(best.seconds) / middle(found.seconds), abs=1e-3)
    assert best.alters == "computes in bfloat16" and best.edits == ("models.policy.train.dtype=bfloat16",)


@pytest.mark.parametrize("corrected", [(), ("update_policy.in.old_logprobs=rollout_logprobs",)])
def test_streaming_is_told_with_what_corrects_for_it(corrected: tuple[str, ...]) -> None:
    """Of a run on two pools, whose answers vary in length."""
    folder, _ = a_run(SPLIT[0], *corrected)
    found = single_changes_of(Priced.of(folder), counted(read_metrics(folder)))
    (change,) = [
        change
        for change in found.changes
        if any("schedule.buffer=" in edit and "batch" not in edit for edit in change.edits)
    ]
    assert "nodes.update_policy.loss.kind=decoupled_ppo" in change.edits
    assert "updates old" in change.alters
    plan = compile_graph("grpo", (SPLIT[0], *corrected, *change.edits), None, Target("h100-8", PROMPT, 575))
    assert plan.schedule.stream and plan.predicted and plan.predicted.stream


@pytest.mark.slow
def test_computing_again_without_need_is_found() -> None:
    folder, _ = a_run("models.policy.train.recompute=true")
    found = single_changes_of(Priced.of(folder), counted(read_metrics(folder)))
    assert ("models.policy.train.recompute=false",) in [change.edits for change in found.changes]


def test_where_nothing_helps_it_says_so() -> None:
    text = (FOLDER / "cpu.yaml").read_text().replace("devices: 4", "devices: 1").replace("4e9", "400e9")
    Path("lone.yaml").write_text(text)
    plan = compile_graph("sft", ["models.policy.path=Qwen/Qwen2.5-0.5B"], None, Target("lone.yaml", PROMPT))
    folder = Path("run")
    folder.mkdir()
    (folder / "plan.json").write_text(plan.json())
    took = {f"time/{step.node}": 1.0 for step in plan.steps}
    lines = [json.dumps({"step": n, "time/step": 2.0, **took}) for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = report_text(make_report(folder))
    assert "nothing would help: of " in text and f"none saves {LEAST_SAVING:.0%}" in text


def test_a_graph_that_has_changed_is_not_guessed_at() -> None:
    Path("mine.yaml").write_text("graph: mine\nextends: grpo\nedits: [{set: {rollout.n: 4}}]\n")
    folder, plan = a_run()
    assert plan.origin
    origin = replace(plan.origin, graph="mine.yaml")
    (folder / "plan.json").write_text(replace(plan, origin=origin).json())
    report = make_report(folder)
    assert report.outlook is None and report.why_none == "mine.yaml has changed since the run"
    assert "what would help is not known: mine.yaml has changed" in report_text(make_report(folder))


# -- the stages of a stream

STREAMED = (SPLIT[0], "schedule.buffer={staleness: 1}", AHEAD[-1])
BUFFER, UPDATE = (5.0, 0.0, 5.0), (2.0, 8.0, 0.0)


@pytest.mark.parametrize(
    ("said", "spent"),
    [
        ("the update decides: it waits for rows 5%", [(4, 0, 6), (1, 9, 0), BUFFER, (9.5, 0.5, 0)]),
        ("generation decides: it is busy 95%", [(9.5, 0.5, 0), (1, 9, 0), (9, 1, 0), UPDATE]),
        ("rewards, advantages on gen decides: it has rows 90%", [(4, 0, 6), (6, 1, 3), BUFFER, UPDATE]),
        ("groups that take long decide: 30% of the time", [(9.5, 0, 0.5), (1, 9, 0), BUFFER, UPDATE]),
        ("generation may begin nothing 50%", [(5, 0, 5), (1, 9, 0), (9, 1, 0), (4, 6, 0)]),
        ("generation decides: it waits 60%", [(4, 6, 0), (1, 9, 0), (9, 1, 0), UPDATE]),
    ],
)
def test_the_stage_that_decides(said: str, spent: list[tuple[float, float, float]]) -> None:
    """Of iterations of ten seconds: seconds in which each stage worked, starved, was held back."""
    plan = compile_graph("grpo", STREAMED, 8)
    line = {
        f"perf/stage/{name}/{what}": took
        for name, seconds in zip(("generation", "behind/gen", "buffer", "update"), spent, strict=True)
        for what, took in zip(("busy", "starved", "held"), seconds, strict=True)
    }
    assert bottleneck(plan, stages(plan, [line, line])).startswith(said)


def test_where_nothing_streams_there_are_no_stages() -> None:
    folder, plan = a_run()
    look_no_further(folder, plan)
    report = make_report(folder)
    assert (report.stages, report.bottleneck) == ((), "")
    assert "stage" not in report_text(report)


# -- the rest, and the forms


def test_memory_and_idle_time() -> None:
    folder, plan = a_run(memory=6e10)
    look_no_further(folder, plan)
    report = make_report(folder)
    (held,) = report.memory
    assert plan.peak
    assert (held.pool, held.measured) == ("main", 6e10)
    assert (held.predicted, held.capacity) == (plan.peak["main"].bytes, plan.peak["main"].capacity)
    assert report.idle == {"main": pytest.approx(0, abs=0.01)}  # rewards run beside its devices
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    beside = {"time/save": 1.0, "time/eval": 9.0}  # which are no steps
    slower = [json.dumps({**line, "time/step": 2 * line["time/step"], **beside}) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(slower) + "\n")
    assert not {"save", "eval"} & {row.step for row in make_report(folder).steps}
    assert make_report(folder).idle == {"main": pytest.approx(0.5, abs=0.005)}
    assert "pool main is idle for 50% of an iteration" in report_text(make_report(folder))
    assert "a device of main has held 60 GB at most; predicted" in report_text(make_report(folder))
    on_gpus = [json.dumps({**line, "perf/memory_used/main-3": 7e10}) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(on_gpus) + "\n")
    assert make_report(folder).memory[0].driver == 7e10
    assert "; with caches and servers 70 GB" in report_text(make_report(folder))


def test_a_step_of_some_iterations_counts_as_often_as_it_ran() -> None:
    folder, plan = a_run()
    look_no_further(folder, plan)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    both = lines[1]["time/update_policy"] / 2
    del lines[2]["time/update_policy"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = [row for row in make_report(folder).steps if row.step == "update_policy"]
    assert row.measured == pytest.approx(both)


@pytest.mark.slow
def test_as_json() -> None:
    folder, _ = a_run()
    result = CliRunner().invoke(main, ["report", str(folder), "--format", "json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    report = make_report(folder)
    assert found["iterations"] == 3 and found["cluster"] == "h100-8"
    assert [row["step"] for row in found["steps"]] == [row.step for row in report.steps]
    assert found["steps"][0]["ratio"] == report.steps[0].ratio
    assert found["outlook"]["changes"][0]["edits"] == list(report.outlook.changes[0].edits)  # type: ignore[union-attr]
    assert found["critical_path"][0] == ["prompts", report.critical_path[0].seconds]


def test_a_run_of_another_version_is_told_without_its_plan() -> None:
    folder, _ = a_run()
    fields = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**fields, "version": 0}))
    report = make_report(folder)
    assert report.steps and not report.critical_path
    assert "what would help is not known: run/plan.json is a plan of version 0" in report_text(
        make_report(folder)
    )
