"""A sweep trains, goes on where it was stopped, and says what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.sweep.combinations import combinations
from rlgraph.sweep.runs import DONE, Sweep

SETTINGS = [
    "models.policy.path=demo_files/model",
    "prompts.batch=4",
    "rollout.n=2",
    "update_policy.minibatches=1",
    "eval.every=1",
    "eval.nodes.prompts.batch=8",
]


@pytest.fixture
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


@pytest.mark.slow
@pytest.mark.usefixtures("_files")
def test_it_trains_goes_on_and_runs_nothing_twice() -> None:
    said: list[str] = []
    runs, folder = combinations("demo", [*SETTINGS, "seed=[0,1]"]), Path("sweep")

    def sweep(steps: int) -> bool:
        said.clear()
        found, done = Sweep("demo", runs, folder, ["--inline", f"--steps={steps}"], said.append).carry_out()
        assert [*found.curves] == ["seed=0", "seed=1"] and found.metrics == ["eval/accuracy"]
        return done

    assert sweep(1) and len(said) == 2
    assert (folder / "sweep.html").is_file() and (folder / "table.csv").read_text().count("\n") == 3
    assert sweep(1) and said == ["2 of 2 runs are done already"]
    done = json.loads((folder / DONE).read_text())
    del done["seed=1"]  # as if it had been stopped after its first iteration
    (folder / DONE).write_text(json.dumps(done))
    assert sweep(2) and len(said) == 2
    steps = [len((folder / run.name / "metrics.jsonl").read_text().splitlines()) for run in runs]
    assert steps == [2, 3]  # evaluations before training are a line
    assert "resumed after iteration 1" in (folder / "seed=1.log").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("_files")
def test_a_run_that_fails_is_named_and_the_others_run() -> None:
    said: list[str] = []
    runs = combinations("demo", [*SETTINGS, "prompts.files=[[nowhere.parquet],[demo_files/train.parquet]]"])
    found, done = Sweep("demo", runs, Path("sweep"), ["--inline", "--steps=1"], said.append).carry_out()
    assert not done and [*found.curves] == [runs[1].name]
    assert "ended with 1, see sweep/" in said[0]
    assert "nowhere.parquet: there is no such file" in Path("sweep", f"{runs[0].name}.log").read_text()
