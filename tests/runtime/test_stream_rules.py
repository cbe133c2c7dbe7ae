"""The rules of streaming in runs: iterations that no whole groups make up, ages, and every prompt once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ran import metrics

from rlgraph.runtime.run import run_graph
from rlgraph.streaming.ledger import GroupLedger

TWO = str(Path(__file__).parent / "ones_two.yaml")
pytestmark = pytest.mark.usefixtures("in_demo")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_filter_that_cuts_groups_starves_no_iteration(staleness: int, tmp_path: Path) -> None:
    """Ten rows of groups of four, of which the filter keeps some: there is room for one group more."""
    graph = tmp_path / "cut.yaml"
    graph.write_text(f"""
graph: cut
extends: {TWO}
edits:
  - remove: [eval]
  - set:
      schedule: {{iterations: 4, buffer: {{staleness: {staleness}, chunk: 5}}}}
      update_policy.rows: kept
      update_policy.in.old_logprobs: rollout_logprobs
      ref_logprobs.rows: kept
  - add:
      kept: {{op: filter.threshold, min: 0.5, refill: {{rows: 10, expected: 0.5}}}}
""")
    run_graph(str(graph), [], 1, run_dir=Path("run"), inline=True)
    lines = metrics("run")
    assert len(lines) == 4
    assert all(line["kept/age_max"] <= staleness for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fifo", "in_order"])
def test_a_run_takes_what_its_ledger_says_and_each_prompt_once(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes: list[list[int]] = []
    take = GroupLedger.take

    def noted(ledger: GroupLedger, *args: Any) -> list[int] | None:
        prompts = ledger.row_prompts
        places = take(ledger, *args)
        if places is not None:
            takes.append([prompts[place] for place in places])
        return places

    monkeypatch.setattr(GroupLedger, "take", noted)
    stream = f"schedule.buffer={{staleness: 1, chunk: 3, order: {order}}}"
    settings = [stream, "schedule.iterations=5", "update_policy.in.old_logprobs=rollout_logprobs"]
    run_graph(TWO, settings, 1, run_dir=Path("run"), inline=True)
    used = Counter(prompt for prompts in takes for prompt in prompts)
    assert len(takes) == 5 and {*used.values()} == {4}  # each prompt once, with its four samples
    assert order == "fifo" or [*used] == [*range(35)]
