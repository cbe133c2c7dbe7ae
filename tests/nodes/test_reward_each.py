"""Rewards that may fail: what a user's function raises, and what the graph makes of it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recorded import means
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.nodes.reward.per_sample import RewardError, each
from rlgraph.ops import Context
from rlgraph.runtime.run import run_graph

ROWS = [{"response": str(number)} for number in range(6)]


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=0)


def score(response: str) -> float:
    """Fails on 2, gives no number on 3."""
    if response == "2":
        raise ValueError("two is unlucky")
    return float("nan") if response == "3" else int(response) / 10


async def score_later(response: str) -> float:
    await asyncio.sleep(0)
    return score(response)


@pytest.mark.parametrize("function", [score, score_later])
@pytest.mark.parametrize("how", ["zero", "drop"])
def test_what_fails_is_counted_and_told_with_its_sample(
    function: Any, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context()
    with caplog.at_level(logging.WARNING):
        out = each(ctx, function, ROWS, how)
    assert out.rewards.tolist() == pytest.approx([0.0, 0.1, 0.0, 0.0, 0.4, 0.5])
    assert out.failed.tolist() == [False, False, True, True, False, False]
    assert means(ctx) == {"reward/mean": (pytest.approx(1.0), 4), "reward/failed": (2.0, 6)}
    assert "2 requests for rewards failed; the first, of sample 2: ValueError: two is unlucky" in caplog.text
    assert "{'response': '2'}" in caplog.text


def test_fail_ends_the_run() -> None:
    with pytest.raises(RewardError, match="two is unlucky"):
        each(context(), score, ROWS)
    with pytest.raises(RewardError, match="it gave nan, which is not a finite number of float32"):
        each(context(), score, ROWS[3:])


@pytest.mark.slow
def test_a_late_one_holds_up_no_other() -> None:
    leave = threading.Event()

    def waits(response: str) -> float:
        if response == "1":
            leave.wait(600)
        return 1.0

    start = time.monotonic()
    out = each(context(), waits, ROWS, "zero", timeout=3.0, parallel=2)
    leave.set()
    assert out.failed.tolist() == [False, True, False, False, False, False]
    assert time.monotonic() - start < 50


def test_of_no_samples() -> None:
    out = each(context(), score, [])
    assert (out.rewards.tolist(), out.failed.tolist()) == ([], [])


# -- in a graph

OPS = """
from rlgraph.ops import Context
from rlgraph.nodes.reward.per_sample import Judged, OnError, each
from rlgraph.ops import op, samples, text


@op(assumes=("dropped",))
def odd(ctx: Context, responses: text[samples], *, on_error: OnError = "fail") -> Judged:
    return each(ctx, score, [{"response": response} for response in responses], on_error)


def score(response):
    if len(response) % 2:
        raise RuntimeError("an odd length")
    return response.count("1") / 4
"""
GRAPH = """
graph: odd
extends: demo
edits:
  - set: {models.policy.path: demo_files/model, prompts.batch: 8, rollout.n: 4, schedule.save_every: 1}
  - remove: [eval]
  - replace: {rewards: {op: "odd.py:odd", on_error: drop}}
"""
FILTER = """
  - add: {judged: {op: filter.judged}}
  - set: {advantages.rows: judged}
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(OPS)


@pytest.mark.usefixtures("_here")
def test_dropping_without_a_filter_is_refused_with_the_edit() -> None:
    Path("odd.yaml").write_text(GRAPH)
    with pytest.raises(GraphError) as caught:
        compile_graph("odd.yaml", (), 1)
    said = str(caught.value)
    assert "none reads `failed`" in said
    assert "add: {judged: {op: filter.judged}}, and set: {advantages.rows: judged}" in said
    compile_graph("odd.yaml", ["rewards.on_error=zero"], 1)


@pytest.mark.usefixtures("_here")
def test_what_is_dropped_is_not_trained_on() -> None:
    from demo_files import make_demo_files

    make_demo_files(Path("demo_files"))
    Path("odd.yaml").write_text(GRAPH + FILTER)
    run_graph("odd.yaml", (), 1, steps=1, inline=True, run_dir=Path("run"))
    rows = [json.loads(line) for line in Path("run/samples/step-000001.jsonl").read_text().splitlines()]
    assert len({len(row["responses"]) % 2 for row in rows}) == 2
    for row in rows:
        assert (row["advantages"] is None) == bool(len(row["responses"]) % 2)
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["judged/kept"] == pytest.approx(1 - line["reward/failed"])
    assert 0 < line["reward/failed"] < 1
