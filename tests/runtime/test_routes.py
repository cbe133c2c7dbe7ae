"""Nodes on rows of their own, by a column's value: what they write is joined, on any number of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.errors import RlgraphError
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
TRAIN, TEST = (f'"${{env:RLGRAPH_TEST_FILES}}/{name}.parquet"' for name in ("train", "test"))
GRAPH = f"""
graph: routed
extends: {HERE / "ones.yaml"}
edits:
  - remove: [rewards]
  - set:
      schedule: {{iterations: 2, record_every: 1}}
      prompts.files: {{a: [{TRAIN}], b: [{TEST}], c: [{TEST}]}}
      prompts.weights: {{a: 3, b: 2, c: 2}}
      advantages.in: {{rewards: told}}
      update_policy.in: {{ref_logprobs: read}}
  - add:
      a: {{op: '{HERE / "ones_ops.py"}:ones', per: 4, rows: {{by: source, is: a}}, out: {{a: rewards}}}}
      b: {{op: '{HERE / "ones_ops.py"}:ones', per: 2, rows: {{by: source, is: [b]}}, out: {{b: rewards}}}}
      rest: {{op: '{HERE / "ones_ops.py"}:ones', per: 1, rows: {{by: source}}, out: {{rest: rewards}}}}
      told: {{op: '{HERE / "route_ops.py"}:by_source'}}
      models.judge: {{path: "${{models.ref.path}}", frozen: true}}
      a_logprobs: {{op: logprobs, model: ref, rows: {{by: source, is: [a, c]}}, out: {{a_logprobs: part}}}}
      no_logprobs: {{op: logprobs, model: ref, rows: {{by: source, is: none}}, out: {{no_logprobs: part}}}}
      b_logprobs: {{op: logprobs, model: judge, rows: {{by: source}}, out: {{b_logprobs: part}}}}
      read: {{op: '{HERE / "route_ops.py"}:alike', in: {{whole: ref_logprobs, merged: part}}}}
"""


def lines_of(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("devices", [1, 2])
def test_every_row_has_what_the_node_of_its_route_wrote(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    Path("routed.yaml").write_text(GRAPH)
    run_on_devices("routed.yaml", "--devices", str(devices), "--run-dir", "kept")
    lines = lines_of("kept")
    trained = [line for line in lines if "told/checked" in line]
    assert len(trained) == 2 and all(line["told/checked"] == line["read/checked"] == 1 for line in trained)
    assert any("eval/accuracy" in line for line in lines)  # its rows are of one source, which the rest takes


@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize(
    "edits",
    [
        "add: {mixed: {op: filter.mixed, in: {rewards: told}, refill: true}}\n"
        "  - set: {advantages.rows: mixed, old_logprobs.rows: mixed}",
        "replace: {pools: {train: {devices: 1}, serve: {devices: 1}}}\n"
        "  - set: {schedule.buffer: {staleness: 1, by: batch}}\n"
        "  - set: {update_policy.in.old_logprobs: rollout_logprobs}",
    ],
    ids=["refilled", "ahead"],
)
def test_routes_are_repeated_and_run_ahead_as_any_node(edits: str) -> None:
    graph = GRAPH.replace("{{ref_logprobs: read}}", "{}").partition("      models.judge")[0]
    graph = graph.replace(
        "      update_policy.in: {ref_logprobs: read}\n", "      update_policy.kl_coef: 0\n"
    )
    Path("routed.yaml").write_text(f"{graph}  - remove: [eval]\n  - {edits}\n")
    run_graph("routed.yaml", (), 1, run_dir=Path("kept"), inline=True)
    assert [line["told/checked"] for line in lines_of("kept")] == [1, 1]


@pytest.mark.usefixtures("in_demo")
def test_a_row_that_no_route_takes_is_named() -> None:
    Path("routed.yaml").write_text(
        f"{GRAPH}  - set: {{rest.rows: {{by: source, is: d}}}}\n  - remove: [eval]\n"
    )
    with pytest.raises(RlgraphError, match=r"row \d+ has source 'c', which no node takes") as caught:
        run_graph("routed.yaml", (), 1, run_dir=Path("kept"), inline=True)
    assert "`rows: {by: source}` without `is`" in str(caught.value)


@pytest.mark.usefixtures("in_demo")
def test_a_row_that_a_filter_took_from_its_route_is_named() -> None:
    dropped = "some: {op: filter.threshold, in: {rewards: plain}, min: 100, rows: {by: source, is: b}}"
    plain = f"plain: {{op: '{HERE / 'ones_ops.py'}:ones'}}"
    edits = f"  - add: {{{plain}, {dropped}}}\n  - set: {{b.rows: some, rest.rows: {{by: source, is: c}}}}\n"
    Path("routed.yaml").write_text(f"{GRAPH}{edits}  - remove: [eval]\n")
    with pytest.raises(RlgraphError, match=r"row \d+ of samples has no `rewards`"):
        run_graph("routed.yaml", (), 1, run_dir=Path("kept"), inline=True)
