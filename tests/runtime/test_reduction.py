"""Samples become prompts in an op that reduces groups, on any number of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.nodes.data.recorded import load as load_recorded
from rlgraph.nodes.support.record_file import steps_of
from rlgraph.ops.column_types import ColumnType

HERE = Path(__file__).parent
GRAPH = f"""
graph: reduced
extends: {HERE / "ones.yaml"}
edits:
  - remove: [eval]
  - set: {{schedule: {{iterations: 2, record_every: 1}}, advantages.in: {{rewards: centred}}}}
  - add:
      solved: {{op: group.mean, in: {{values: rewards}}}}
      centred: {{op: '{HERE / "reduction_ops.py"}:centred'}}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_mean_of_each_prompt_s_samples_comes_back_to_them(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    Path("reduced.yaml").write_text(GRAPH)
    run_on_devices("reduced.yaml", "--devices", str(devices), "--run-dir", "kept")
    lines = [json.loads(line) for line in Path("kept/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["centred/checked"] == 1 for line in lines)
    recorded = steps_of(Path("kept"))[1]
    per_prompt = load_recorded(recorded, {"solved": ColumnType.parse("float32[prompts]")})["solved"]
    rewards = load_recorded(recorded, {"rewards": ColumnType.parse("float32[samples]")})["rewards"]
    assert per_prompt.view(7, 4)[:, 0].tolist() == pytest.approx(rewards.view(7, 4).mean(1).tolist())


@pytest.mark.usefixtures("in_demo")
def test_what_may_not_see_whole_groups_is_refused() -> None:
    filtered = GRAPH.replace("group.mean, in", "group.mean, rows: mixed, in")
    Path("filtered.yaml").write_text(f"{filtered}  - add: {{mixed: {{op: filter.mixed}}}}\n")
    with pytest.raises(GraphError, match="of some there may be none") as caught:
        compile_graph("filtered.yaml", devices=1)
    assert "leave out `rows: mixed`" in str(caught.value)
    Path("own.py").write_text(
        "from rlgraph.ops import float32, op, prompts, samples\n\n\n"
        "@op()\ndef mean(values: float32[samples]) -> float32[prompts]:\n    return values\n"
    )
    Path("own.yaml").write_text(GRAPH.replace("group.mean", "own.py:mean"))
    with pytest.raises(GraphError, match="may see a part of it"):
        compile_graph("own.yaml", devices=1)


@pytest.mark.usefixtures("in_demo")
def test_groups_that_a_rollout_leaves_unfinished_are_not_reduced() -> None:
    reduced = "solved: {op: group.mean, in: {values: rewards}}"
    reader = "centred: {op: metric.mean_at_k, in: {rewards: solved}}"
    added = f"  - add: {{{reduced}, {reader}}}\n  - set: {{advantages.in: {{rewards: centred}}}}"
    Path("left.yaml").write_text(f"graph: left\nextends: {HERE / 'partial.yaml'}\nedits:\n{added}\n")
    with pytest.raises(GraphError, match="leaves for later iterations"):
        compile_graph("left.yaml", devices=1)
