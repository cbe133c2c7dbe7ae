"""Calibration: a run whose times are known multiples of the prediction gives them back; plans foretell it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.calibration import RATES, load_calibration
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import ASSUMED
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.step_rates import rate_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError, RunError
from rlgraph.ir.plan import Plan, Target
from rlgraph.reports.measured import Priced
from rlgraph.reports.plan_file import compile_again
from rlgraph.reports.report import make_report, report_text
from rlgraph.units import middle

TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
TIMES = {"generate": 3.0, "score": 0.5, "update": 2.0, "sync": 7.0, "repartition": 0.1, "host": 1.0}
LENGTHS = (10.0, 20.0, 30.0, 25.0)  # mean responses of each iteration
PROMPT = 12.0
NARROW = ("dtype=bfloat16", "micro_tokens=5632")


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(TINY))


def planned(target: Target | None = None, *overrides: str) -> Plan:
    small = ["models.policy.path=tiny", "rollout.max_new_tokens=64", *overrides]
    return compile_graph("grpo", small, None if target else 2, target)


def a_run(plan: Plan, times: Mapping[str, float] = TIMES, wobble: float = 0.0) -> Path:
    """A run whose every step took ``times`` of the middle; the first iteration took ten times as long."""
    folder = Path("run")
    folder.mkdir()
    (folder / "plan.json").write_text(plan.json())
    lines = []
    for number, length in enumerate(LENGTHS):
        pricing = Pricing(plan, load_cluster("cpu"), workload(plan, PROMPT, length), sizes_of(plan))
        slower = 10.0 if number == 0 else 1 + wobble * (number - 2)
        took = {f"time/{s.node}": slower * times.get(rate_of(s), 1.0) * pricing.middle(s) for s in plan.steps}
        whole = sum(took[f"time/{s.node}"] for s in plan.steps if not s.on_host)  # others run meanwhile
        line = {"step": number + 1, "rollout/length": length, "time/step": whole, **took}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(['{"step": 0, "eval/accuracy": 0.5}', *lines]) + "\n")
    os.utime(folder / "metrics.jsonl", (1.7e9, 1.7e9))
    return folder


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def calibrated(
    run: Path, cluster: str | None = None, prompt_tokens: float | None = None
) -> dict[str, object]:
    """Return the factors of a run, which are then in found.yaml, too."""
    text = Priced.of(run, cluster, prompt_tokens).calibration()
    Path("found.yaml").write_text(text, encoding="utf-8")
    found = yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_the_command_writes_what_was_found_and_says_how_to_use_it() -> None:
    """Other tests go without the command, which also plans the graph again with each change that may help."""
    run = a_run(planned(Target("cpu", PROMPT)))
    result = call("report", str(run), "--calibrate", "told.yaml")
    assert result.exit_code == 0, result.stderr
    assert "calibrated: rlgraph plan GRAPH --cluster ... --calibration told.yaml" in result.stderr
    calibrated(run)
    assert Path("told.yaml").read_text() == Path("found.yaml").read_text()


def test_the_multiples_come_back() -> None:
    run = a_run(planned(Target("cpu", PROMPT)))
    found = calibrated(run)
    assert found.pop("calibration") == "grpo on cpu, 2023-11-14"
    assert found.keys() == TIMES.keys()
    assert found == {kind: [pytest.approx(factor, rel=1e-3)] * 2 for kind, factor in TIMES.items()}


def test_what_a_pool_waits_between_rounds_comes_back() -> None:
    """Rounds of 0.5 s with 0.03 s between them, and another step in some of the gaps."""
    streamed = ("pools={train: {devices: 2}, gen: {devices: 2}}", "schedule.buffer={staleness: 1}")
    plan = planned(Target("cpu", PROMPT), *streamed, "update_policy.in.old_logprobs=rollout_logprobs")
    run = a_run(plan)
    drawn, source = (
        next(s for s in plan.steps if s.unfinished),
        next(s for s in plan.steps if s.node == "prompts"),
    )
    events, at = ["["], 0
    for number in range(40):
        args = {"iteration": number // 10 + 1, "phase": "train"}
        bar = {"ph": "X", "pid": drawn.pool, "tid": 0}
        if number % 2:
            events.append(
                json.dumps({**bar, "ts": at + 10_000, "dur": 5_000, "args": {**args, "step": source.id}})
            )
            at += 5_000
        at += 30_000
        events.append(json.dumps({**bar, "ts": at, "dur": 500_000, "args": {**args, "step": drawn.id}}))
        at += 500_000
    (run / "timeline.json").write_text("\n".join(f"{event}," for event in events) + "\n")
    assert calibrated(run)["round"] == [pytest.approx(0.03 / middle(ASSUMED.round), rel=1e-3)] * 2


def test_comments_say_where_it_comes_from() -> None:
    calibrated(a_run(planned(Target("cpu", PROMPT))))
    text = Path("found.yaml").read_text()
    assert "# run: grpo, iterations 2 to 4, 2023-11-14" in text
    assert "on 4 devices of cpu, prompts of 12.0 tokens (taken), responses of 25.0" in text
    assert "  # old_logprobs, ref_logprobs" in text


def test_a_spread_is_a_range() -> None:
    found = calibrated(a_run(planned(Target("cpu", PROMPT)), wobble=0.5))
    # iterations took 0.5, 1 and 1.5 times as long: a tenth of the way from the first to the second, and back
    assert found["update"] == [pytest.approx(1.2, rel=1e-2), pytest.approx(2.8, rel=1e-2)]


def test_lengths_are_no_factor() -> None:
    """What was generated is what ratios are taken against, not what the plan assumed."""
    found = calibrated(a_run(planned(Target("cpu", PROMPT, response_tokens=60))))
    assert found["generate"] == [pytest.approx(3, rel=1e-3)] * 2


def test_prompts_can_be_said_afterwards() -> None:
    run = a_run(planned(Target("cpu")))
    assert calibrated(run)["update"] != [pytest.approx(2, rel=1e-3)] * 2
    assert calibrated(run, prompt_tokens=PROMPT)["update"] == [pytest.approx(2, rel=1e-3)] * 2


def test_a_calibrated_plan_foretells_the_run() -> None:
    run = a_run(planned(Target("cpu", PROMPT)))
    calibrated(run)
    plan = planned(Target("cpu", PROMPT, LENGTHS[-1], "found.yaml"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for step in plan.steps:
        assert step.seconds == (pytest.approx(last[f"time/{step.node}"], rel=1e-2, abs=2e-6),) * 2
    assert plan.predicted
    assert plan.predicted.seconds == (pytest.approx(last["time/step"], rel=1e-2),) * 2


def test_what_a_file_does_not_name_keeps_its_range() -> None:
    Path("f.yaml").write_text("calibration: a guess\nupdate: [4, 1]\n")
    plain = planned(Target("cpu", PROMPT, 20))
    plan = planned(Target("cpu", PROMPT, 20, "f.yaml"))
    for a, b in zip(plain.steps, plan.steps, strict=True):
        assert a.seconds and b.seconds
        center = math.sqrt(a.seconds[0] * a.seconds[1])
        expected = (center, 4 * center) if a.updated else a.seconds
        assert b.seconds == pytest.approx(expected, rel=1e-3)


def test_a_run_that_was_calibrated_is_held_against_the_model_itself() -> None:
    Path("f.yaml").write_text("calibration: a guess\nupdate: [40, 50]\n")
    found = calibrated(a_run(planned(Target("cpu", PROMPT, None, "f.yaml"))))
    assert found["update"] == [pytest.approx(2, rel=1e-3)] * 2


def test_every_kind_of_work_is_some_step() -> None:
    wide = [f"models.{name}.train.{what}" for name in ("policy", "ref") for what in NARROW]
    seven = ["models.policy.path=Qwen/Qwen2.5-7B", "models.policy.serve.dtype=bfloat16", *wide]
    plan = compile_graph("grpo", seven, target=Target("h100-8"))
    assert {rate_of(step) for step in plan.steps} == {*RATES} - {"round"}


# -- the command line


def test_the_plan_says_what_it_is_calibrated_on() -> None:
    calibrated(a_run(planned(Target("cpu", PROMPT))))
    small = ("plan", "grpo", "models.policy.path=tiny", "--cluster", "cpu", "--calibration", "found.yaml")
    assert "calibrated on grpo on cpu, 2023-11-14\n" in call(*small).stdout
    assert "not calibrated" not in call(*small).stdout
    assert call(*small, "-o", "plan.json").exit_code == 0
    saved = json.loads(Path("plan.json").read_text())
    assert saved["origin"]["target"]["calibration"] == "found.yaml"
    assert call("plan", "plan.json").stdout == call(*small).stdout


def test_how_to_plan_again_names_lengths_and_the_calibration() -> None:
    calibrated(a_run(planned(Target("cpu", PROMPT))))
    Path("mine.yaml").write_text("extends: grpo\ngraph: mine\nedits: [{set: {models.policy.path: tiny}}]\n")
    lengths = ("--response-tokens", "p50=5,p99=50")
    words = ("mine.yaml", "--cluster", "cpu", *lengths, "--calibration", "found.yaml", "-o", "plan.json")
    assert call("plan", *words).exit_code == 0
    Path("mine.yaml").write_text(
        "extends: grpo\ngraph: mine\nedits: [{set: {models.policy.path: tiny, seed: 3}}]\n"
    )
    with pytest.raises(RunError) as caught:
        compile_again(Path("plan.json"))
    assert f"rlgraph plan {' '.join(words)}" in str(caught.value)


def test_a_calibration_is_for_a_cluster() -> None:
    result = call("plan", "grpo", "--calibration", "found.yaml")
    assert result.exit_code == 2 and "are for --cluster" in result.stderr


def test_a_run_that_was_planned_for_no_cluster_asks_for_one() -> None:
    run = a_run(planned())
    result = call("report", str(run), "--calibrate", "found.yaml")
    assert result.exit_code == 1
    assert "run was planned for no cluster\n  say what it ran on: --cluster NAME_OR_FILE" in result.stderr
    assert not Path("found.yaml").exists()
    found = calibrated(run, "cpu", PROMPT)
    assert found["score"] == [pytest.approx(0.5, rel=1e-3)] * 2


def test_prompts_of_a_report_are_for_a_prediction() -> None:
    result = call("report", str(a_run(planned())), "--prompt-tokens", "5")
    assert result.exit_code == 2 and "--cluster and --calibrate" in result.stderr


# -- errors


def test_a_folder_without_a_run() -> None:
    for options in ((), ("--calibrate", "found.yaml")):
        result = call("report", "tiny", *options)
        assert result.exit_code == 1 and "tiny holds no run: there is no tiny/" in result.stderr


def test_one_iteration_is_too_few() -> None:
    run = a_run(planned(Target("cpu", PROMPT)))
    lines = (run / "metrics.jsonl").read_text().splitlines(True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(RunError, match=r"too few iterations to calibrate on: 1\n  the first warms up"):
        Priced.of(run).calibration()


def test_a_cluster_that_is_too_small() -> None:
    text = (FOLDER / "cpu.yaml").read_text().replace("devices: 4", "devices: 1")
    Path("one.yaml").write_text(text.replace("cluster: cpu", "cluster: one"))
    with pytest.raises(RunError, match="run ran on 2 devices; one has 1"):
        Priced.of(a_run(planned()), "one.yaml")


def test_a_name_that_means_another_cluster_now() -> None:
    """As `auto` does on another machine."""
    text = (FOLDER / "cpu.yaml").read_text()
    Path("mine.yaml").write_text(text.replace("cluster: cpu", "cluster: then"))
    run = a_run(planned(Target("mine.yaml", PROMPT)))
    Path("mine.yaml").write_text(text.replace("cluster: cpu", "cluster: now"))
    with pytest.raises(RunError, match="was planned for then; that name is now here and now\n  say what"):
        Priced.of(run)
    assert Priced.of(run, "cpu").cluster.cluster == "cpu"


def test_what_is_wrong_with_a_file() -> None:
    Path("bad.yaml").write_text("calibration: a guess\nupdte: [1, 2]\nscore: [1]\nsync: [0, 1]\n")
    with pytest.raises(GraphError) as caught:
        load_calibration("bad.yaml")
    said = str(caught.value)
    assert "bad.yaml:2:1" in said and "did you mean `update`?" in said
    assert "`calibration.score`" in said and "`calibration.sync" in said
    with pytest.raises(GraphError, match=r"nowhere\.yaml: can't be read"):
        load_calibration("nowhere.yaml")


# -- the report


def rows(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if "share of the iteration" in line)
    return [line.split()[0] for line in lines[start + 1 : lines.index("", start)]]


def of_steps(text: str) -> list[str]:
    return text.partition("share of the iteration")[2].partition("critical path")[0].splitlines()


@pytest.mark.slow
def test_a_report_of_a_planned_run_shows_the_worst_misprediction_first() -> None:
    run = a_run(planned(Target("cpu", PROMPT, 25)), {**dict.fromkeys(TIMES, 1.0), "score": 0.01})
    text = report_text(make_report(run))
    assert {*rows(text)[:2]} == {"old_logprobs", "ref_logprobs"} and rows(text)[-1] == "iteration"
    for line in of_steps(text):
        if "old_logprobs" in line and "repartition" not in line:
            assert float(line.split()[-1]) == pytest.approx(0.01, rel=0.02)
    assert "responses of 25 tokens (--response-tokens)" in text and "responses had 25.0 tokens" in text


def test_a_report_for_a_cluster_predicts_for_what_was_generated() -> None:
    text = report_text(make_report(a_run(planned()), cluster="cpu", prompt_tokens=PROMPT))
    lines = of_steps(text)
    (line,) = [line for line in lines if "update_policy" in line and "repart" not in line]
    assert float(line.split()[-1]) == pytest.approx(2, rel=0.05)  # lengths differ, the mean is taken


def test_a_report_without_predictions_shows_the_slowest_first() -> None:
    text = report_text(make_report(a_run(planned(), {"repartition": 1e4})))
    assert rows(text)[0].startswith("repartition:") and "predicted" not in text
