"""Runs that end once a metric has come far enough: where they end, what they leave, what a resume does."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ran import metrics, same_weights

from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
AHEAD = ("schedule.buffer={staleness: 1, by: batch}", "update_policy.in.old_logprobs=rollout_logprobs")
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None: ...


def train(run_dir: str, *settings: str, graph: str = ONE, **options: Any) -> list[dict[str, Any]]:
    overrides = ("schedule.iterations=5", *settings)
    run_graph(graph, overrides, 1, run_dir=Path(run_dir), inline=True, **options)
    return metrics(run_dir)


def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: v for name, v in line.items() if not name.startswith("eval/")} for line in lines[1:]]


def stop(metric: str, bound: float, **more: Any) -> str:
    return f"schedule.stop={json.dumps({'metric': metric, 'at_least': bound, **more})}"


# what ends a run is decided by the driver, for any number of pools
@pytest.mark.parametrize("graph", [ONE, pytest.param(TWO, marks=pytest.mark.nightly)])
def test_a_run_ends_where_its_metric_is_reached_and_is_whole_until_there(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = AHEAD if graph == TWO else ()
    whole = train("whole", *ahead, graph=graph)
    rewards = [line["reward/mean"] for line in whole[1:]]
    bound = max(rewards[:3])  # of the first three, so some are left
    at = 1 + next(n for n, reward in enumerate(rewards) if reward >= bound)
    last = min(at + bool(ahead), 5)  # what has begun ends
    early = train("early", *ahead, stop("reward/mean", bound), graph=graph)
    assert trained(early) == trained(whole[: last + 1])
    assert "eval/accuracy" in early[-1], "it ends as a run does"
    assert os.listdir("early/checkpoints") == [f"step-{last:06d}"]
    assert os.listdir("early/models") == ["policy"]
    said = capsys.readouterr().out.rpartition("is done after")[2]
    reason = f"`reward/mean` is {bound:.4g} after iteration {at}, at least {bound:g} (schedule.stop)"
    assert re.match(rf" {last} iterations in \d+:\d\d:\d\d\n  {re.escape(reason)}\n", said)
    report = make_report(Path("early"))
    assert report.ended == reason
    assert f"it ended early: {reason}" in report_text(report)
    assert make_report(Path("whole")).ended == ""
    again = train("early", *ahead, stop("reward/mean", bound), graph=graph, resume=True)
    assert again == early, "it has ended, and does not go on"
    longer = train("early", *ahead, "schedule.stop=null", graph=graph, resume=True)
    if not ahead:
        assert trained(longer) == trained(whole)
        assert same_weights("early", "whole")


def test_an_evaluation_ends_it_after_so_many_in_a_row() -> None:
    lines = train("a", "eval.every=1", stop("eval/accuracy", 0, times=3))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("eval/accuracy" in line for line in lines)
    assert os.listdir("a/checkpoints") == ["step-000002"]


@pytest.mark.parametrize("graph", [ONE, pytest.param(TWO, marks=pytest.mark.nightly)])
def test_the_last_iteration_has_a_samples_file_whatever_ends_the_run(graph: str) -> None:
    """An evaluation that ends it is done when the next iteration is, where it streams."""
    stream = "schedule.buffer={staleness: 1, chunk: 4}"
    ahead = (stream, AHEAD[1]) if graph == TWO else ()
    for run, ends in (("a", stop("eval/accuracy", 0, times=2)), ("b", stop("reward/mean", -9))):
        last = train(run, *ahead, "eval.every=1", ends, graph=graph)[-1]["step"]
        assert last < 5
        names = {path.name for path in Path(run, "samples").iterdir()}
        assert f"step-{last:06d}.jsonl" in names and f"step-{last - 1:06d}.jsonl" not in names


def test_a_model_that_is_good_enough_is_not_trained() -> None:
    assert [line["step"] for line in train("a", stop("eval/accuracy", 0))] == [0]
    assert os.listdir("a/models") == ["policy"]


def test_a_metric_that_is_not_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(train("a", "schedule.iterations=2", stop("reward/maen", 0))) == 3
    law = "schedule.stop waits for `reward/maen`, which this iteration did not measure"
    assert f"note: {law}; did you mean `reward/mean`?" in capsys.readouterr().out
