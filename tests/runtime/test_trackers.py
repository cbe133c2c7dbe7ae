"""Metrics reach TensorBoard, Weights & Biases and MLflow; iterations can be traced."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.trackers import IDS, Wandb, installed, open_trackers

ONES = str(Path(__file__).parent / "ones.yaml")
FIRST = {"reward/mean": 0.5}
SECOND = {"reward/mean": 0.75, "time/step": 1.5, "eval/pass@8": 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.yaml").write_text("graph: small\n")
    return tmp_path


def tracked(names: list[str], folder: Path) -> None:
    """Two iterations, the second one after a restart."""
    for step, values in ((1, FIRST), (2, SECOND)):
        trackers = open_trackers(names, folder, "small", step)
        for tracker in trackers:
            tracker.log(values, step)
            tracker.close(failed=step == 1)


def test_tensorboard_is_always_there(folder: Path) -> None:
    tracked([], folder)
    files = sorted((folder / "tensorboard").iterdir())
    found = b"".join(file.read_bytes() for file in files)
    assert b"reward/mean" in found and b"time/step" in found
    assert not (folder / IDS).exists()


def test_a_service_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if not absent:
        pytest.skip("all are here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=f"--track {absent[0]}: that is not installed\n  pip install"):
        run_graph(ONES, track=absent)
    assert not [*tmp_path.iterdir()]
    installed([])


@pytest.mark.filterwarnings("default")  # the service's own
def test_mlflow_keeps_one_run_over_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store", exc_type=ImportError)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked(["mlflow"], folder)
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.run_id == json.loads((folder / IDS).read_text())["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"reward/mean": 0.75, "eval/pass_8": 0.25, "time/step": 1.5}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.75)]


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_one_run_over_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = open_trackers(["wandb"], folder, "small", 1)
    for tracker in trackers:
        tracker.log(SECOND, 1)
        tracker.close(failed=False)
    name = json.loads((folder / IDS).read_text())["wandb"]
    (log,) = (folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    assert b"eval/pass@8" in log.read_bytes() and b"time/step" in log.read_bytes()
    again = Wandb(folder, "small")
    assert again.run.id == name
    again.close(failed=False)


@pytest.mark.parametrize("text", ["0", "x", "1,,2", "3-4"])
def test_iterations_are_whole_numbers_from_1(text: str) -> None:
    done = CliRunner().invoke(main, ["run", "demo", "--profile", text])
    assert done.exit_code == 2 and "counted from 1: write 3 or 3,4" in done.output


def test_chosen_iterations_are_traced(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    few = ("prompts.batch=2", "rollout.n=2")
    run_graph(ONES, few, 1, run_dir=Path("run"), inline=True, profile=[1, 3])
    traces = sorted(str(path.relative_to("run/profile")) for path in Path("run/profile").rglob("*.gz"))
    assert traces == ["step-000001/main-0.json.gz", "step-000003/main-0.json.gz"]
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    trace = json.loads(gzip.decompress(Path("run/profile", traces[1]).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
