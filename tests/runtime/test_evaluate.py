"""Evaluations without training: of a run's checkpoints, of the models of a graph; and none before it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from ran import metrics, same_weights
from transformers import AutoTokenizer

from rlgraph.cli.main import main
from rlgraph.costs.model_size import size_of
from rlgraph.errors import RunError
from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime.evaluate import evaluate
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph
from rlgraph.view.contents import contents
from rlgraph.view.subject import recorded

ONE = str(Path(__file__).parent / "ones.yaml")
SCHEDULE = "schedule={iterations: 3, save_every: 1, keep: 3}"


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None: ...


def train(run_dir: str, *settings: str, **options: Any) -> None:
    run_graph(ONE, (SCHEDULE, *settings), 1, run_dir=Path(run_dir), inline=True, **options)


def evaluated(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name == "step" or name.startswith("eval/")}


def files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_checkpoint_is_evaluated_as_the_run_did(capsys: pytest.CaptureFixture[str]) -> None:
    train("a", "eval.every=1")
    run, before = metrics("a"), files("a")
    for name, step in ((None, 3), ("step-000001", 1)):
        capsys.readouterr()
        folder = evaluate("a", (), 1, checkpoint=name, inline=True)
        assert [evaluated(line) for line in metrics(str(folder))] == [evaluated(run[step])]
        assert f"after {step} iterations: eval/accuracy " in capsys.readouterr().out
        sample = f"samples/step-{step:06d}-eval.jsonl"
        assert (folder / sample).read_bytes() == Path("a", sample).read_bytes()
    assert os.listdir("runs") == ["ones-eval", "ones-eval-2"] or len(os.listdir("runs")) == 2
    assert files("a") == before, "the run is as it was"
    assert not os.listdir("runs/ones-eval/checkpoints") and not Path("runs/ones-eval/models").exists()
    assert "eval/accuracy" in report_text(make_report(Path("runs/ones-eval")))


def test_the_folder_of_a_run_is_enough(tmp_path: Path) -> None:
    """The file of its graph may say something else now, or be gone. The page of the run reads the copy."""
    parent = f"graph: mine\nextends: {ONE}\n"
    rows = "edits: [{set: {eval.nodes.prompts.files: [rows.jsonl]}}]\n"
    Path("graphs").mkdir()
    Path("graphs/rows.jsonl").write_text('{"question": "10+10=", "answer": "20"}\n' * 4)
    graph = Path("graphs/mine.yaml")
    graph.write_text(parent + rows)
    settings = (SCHEDULE, "schedule.iterations=1")
    run_graph(str(graph), settings, 1, run_dir=Path("a"), inline=True)
    run = tmp_path / "a"
    last = evaluated(metrics(str(run))[-1])
    assert last["eval/rows"] == 4

    def places() -> set[str]:
        (step, *_) = contents(recorded(run))["phases"]["train"]["steps"]
        return {place.rpartition(":")[0] for _, _, place in step["attributes"] if place}

    graph.write_text(parent)
    assert evaluated(metrics(str(evaluate(str(run), (), 1, inline=True)))[-1]) == last
    graph.unlink()
    assert evaluated(metrics(str(evaluate(str(run), (), 1, inline=True)))[-1]) == last
    assert places() == {"graph.yaml"}
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert evaluated(metrics(str(evaluate(str(run), (), 1, inline=True)))[-1]) == last
    assert places() == {"graph.yaml"}


def test_a_model_is_evaluated_by_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    train("a")
    model = "models.policy.path=a/models/policy"
    folder = evaluate(ONE, (model,), 1, inline=True, run_dir=Path("own"))
    (line,) = metrics(str(folder))
    assert evaluated(line) == {**evaluated(metrics("a")[-1]), "step": 0}
    assert str(folder) == "own"


def test_an_evaluation_may_be_another_than_the_run_had(capsys: pytest.CaptureFixture[str]) -> None:
    train("a")
    folder = evaluate("a", ("eval.report={ones: rewards, same: rewards}",), 1, inline=True)
    (line,) = metrics(str(folder))
    assert line["eval/ones"] == line["eval/same"]
    assert "other than in the run: eval.report.ones: nothing -> rewards" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"can't go on with other settings.*\n    models\.policy\.path"):
        evaluate("a", ("models.policy.path=a/models/policy",), 1, inline=True)


@pytest.mark.slow
def test_on_devices(workers: str) -> None:
    train("a")
    folder = evaluate("a", (), 2)
    assert evaluated(metrics(str(folder))[0]) == pytest.approx(evaluated(metrics("a")[-1]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--checkpoint", "step-000009"], "a has no checkpoint step-000009: it has step-000001"),
        ([ONE, "--checkpoint", "step-000009"], "ones.yaml is not a run, and has no checkpoint step-000009"),
        (["a/models/policy"], "is a model, and a graph says what is measured\n  rlgraph eval GRAPH models"),
        (["nowhere"], "nowhere"),
        (["bare.yaml"], "has no `eval`, which says what is measured"),
    ],
)
def test_what_can_not_be_evaluated_is_said_before_anything_is_made(arguments: list[str], said: str) -> None:
    train("a", steps=1)
    Path("bare.yaml").write_text(f"extends: {ONE}\nedits: [{{remove: [eval]}}]\n")
    result = CliRunner().invoke(main, ["eval", *arguments, "--inline"])
    assert result.exit_code == 1 and said in result.output
    assert "Traceback" not in result.output and not Path("runs").exists()


@pytest.mark.slow
def test_a_run_may_begin_without_an_evaluation() -> None:
    train("a", "eval.before=false")
    lines = metrics("a")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["eval/accuracy" in line for line in lines] == [False, False, True]
    train("b")
    assert evaluated(metrics("b")[-1]) == evaluated(lines[-1])
    assert json.loads(Path("a/plan.json").read_text())["eval_before"] is False
    said = Path("a/plan.txt").read_text()
    assert "\nevaluate after the last, reporting accuracy = mean of rewards\n" in said


@pytest.mark.slow
def test_an_evaluation_needs_no_room_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    train("a", steps=1)

    def refuse(*args: Any) -> None:
        raise RunError("a checkpoint does not fit")

    monkeypatch.setattr("rlgraph.runtime.rundir.rundir.RunDir.check_room", refuse)
    assert len(metrics(str(evaluate("a", (), 1, inline=True)))) == 1
    with pytest.raises(RunError, match="does not fit"):
        train("b", steps=1)


@pytest.mark.slow
def test_an_evaluation_that_is_stopped_leaves_no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    train("a", steps=1)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlgraph.runtime.training.TrainingRun._write_samples", interrupted)
    with pytest.raises(RunError, match="stopped at once: nothing was measured"):
        evaluate("a", (), 1, inline=True)
    assert not Path("runs/ones-eval/metrics.jsonl").exists()


@pytest.mark.slow
def test_models_at_urls_are_copied_once_and_used_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    memory, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/model"
    for file in Path(os.environ["RLGRAPH_TEST_FILES"], "model").iterdir():
        memory.pipe(f"{url}/{file.name}", file.read_bytes())
    train("a", f"models.policy.path={url}", steps=1)
    train("b", steps=1)
    assert metrics("a") == metrics("b") and same_weights("a", "b")
    assert url in Path("a/plan.json").read_text()
    assert len([*(tmp_path / "cache").rglob("config.json")]) == 1
    memory.rm(url, recursive=True)  # it is not asked again
    monkeypatch.setenv("MODEL_AT", url)
    train("d", "models.policy.path=${env:MODEL_AT}", steps=1)
    assert metrics("d") == metrics("a")
    assert size_of("${env:MODEL_AT}").parameters == size_of(url).parameters
    export(Path("a"), Path("out"), checkpoint="step-000001")
    assert size_of(url).parameters == size_of("out").parameters
    with pytest.raises(RunError, match="memory://nowhere: there is no such file"):
        train("c", "models.policy.path=memory://nowhere")


FAILING = """
from rlgraph.ops import boolean, float32, op, samples

@op()
def unmeasured(rewards: float32[samples]) -> float32[samples]:
    raise ValueError("this can't be measured")
"""


@pytest.mark.parametrize("devices", [1])
def test_what_is_trained_is_saved_before_an_evaluation_that_fails(devices: int) -> None:
    Path("failing.py").write_text(FAILING)
    bad = (
        "eval.nodes.bad={op: 'failing.py:unmeasured'}",
        "eval.report={bad: bad}",
        "eval.before=false",
        "schedule.save_every=0",
    )
    with pytest.raises(RunError, match="this can't be measured"):
        train("a", *bad, steps=2)
    assert [path.name for path in sorted(Path("a/checkpoints").iterdir())] == ["step-000002"]
    assert Path("a/models/policy/config.json").is_file()
    assert [line["step"] for line in metrics("a")] == [1]  # the line of the second waited for the evaluation
    # the checkpoint is whole: another evaluation measures it
    folder = evaluate("a", ("eval.nodes={}", "eval.report={ones: rewards}"), devices, inline=True)
    assert "eval/ones" in metrics(str(folder))[0]


def test_an_evaluation_in_the_middle_that_fails_loses_no_iteration() -> None:
    Path("failing.py").write_text(FAILING)
    bad = ("eval.nodes.bad={op: 'failing.py:unmeasured'}", "eval.report={bad: bad}", "eval.before=false")
    with pytest.raises(RunError, match="this can't be measured"):
        train("a", *bad, "eval.every=1", "schedule.save_every=0", steps=3)
    assert os.listdir("a/checkpoints") == ["restart-000001"]  # what --resume goes on from
    assert not Path("a/models").exists()


@pytest.mark.slow
def test_an_evaluation_says_how_much_of_its_set_it_measures() -> None:
    rows = [("12 + 34= ?", "46"), ("12 + 34 + 56 + 78= ?", "180"), ("21 + 43= ?", "64")]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    Path("held_out.jsonl").write_text("\n".join(lines) + "\n")
    held_out = ("eval.before=false", "eval.nodes.prompts.files=[held_out.jsonl]")
    train("a", *held_out, steps=1)
    assert metrics("a")[-1]["eval/rows"] == 3
    tokenizer = AutoTokenizer.from_pretrained("a/models/policy")
    shorter = len(tokenizer(rows[1][0])["input_ids"]) - 1
    train("b", *held_out, f"eval.nodes.prompts.max_prompt_tokens={shorter}", steps=1)
    assert metrics("b")[-1]["eval/rows"] == 2
    assert metrics("b")[-1]["eval/overlong"] == pytest.approx(1 / 3)
