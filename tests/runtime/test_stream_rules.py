"""The rules of streaming in runs: iterations that no whole groups make up, ages, and every prompt once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ran import metrics

from rlgraph.planning.admission import Stock
from rlgraph.runtime.driver.flow import Flow, FlowRound
from rlgraph.runtime.driver.row_buffer import BufferedRows
from rlgraph.runtime.run import run_graph

TWO = str(Path(__file__).parent / "ones_two.yaml")
pytestmark = pytest.mark.usefixtures("in_demo")


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
      schedule: {{iterations: 4, stream: {{staleness: {staleness}, chunk: 5}}}}
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


class Watched(Flow):
    """A flow beside which the simulator keeps its own account, told only which groups have finished."""

    takes: ClassVar[list[list[int]]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stock = Stock(self.rules)

    def advance(self) -> Any:
        before = self.position
        steps = super().advance()
        if steps:
            self.stock.now = self.now
            assert self.stock.begin(self.last) == range(before, self.position)
            assert self.stock.unused == self.ahead
        return steps

    def _absorb(self, ended: FlowRound) -> None:
        buffered, _ = ended.outcome()
        super()._absorb(ended)
        kept = Counter(buffered.prompts.tolist())
        for number in sorted({*ended.groups().tolist()} - {*ended.unfinished().prompts.prompts.tolist()}):
            self.stock.finish(number, kept[number])
        assert self.stock.prompts == self.buffer.prompts.tolist()

    def _measured(self, used: BufferedRows, iteration: int) -> dict[str, float]:
        taken = self.stock.take()
        assert taken == [*zip(used.prompts.tolist(), used.made.tolist(), strict=True)]
        self.takes.append(used.prompts.tolist())
        return super()._measured(used, iteration)


@pytest.mark.parametrize("order", ["fifo", "in_order"])
def test_the_simulator_keeps_the_same_account_as_the_runtime(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlgraph.runtime.segments.Flow", Watched)
    monkeypatch.setattr(Watched, "takes", [])
    stream = f"schedule.stream={{staleness: 1, chunk: 3, order: {order}}}"
    settings = [stream, "schedule.iterations=5", "update_policy.in.old_logprobs=rollout_logprobs"]
    run_graph(TWO, settings, 1, run_dir=Path("run"), inline=True)
    used = Counter(prompt for taken in Watched.takes for prompt in taken)
    assert len(Watched.takes) == 5 and {*used.values()} == {4}  # each prompt once, with its four samples
    assert order == "fifo" or [*used] == [*range(35)]
