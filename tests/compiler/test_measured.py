"""What a run's metrics say of its workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.reports.measured import Priced, prompt_tokens


def test_prompts_are_as_long_as_they_were() -> None:
    priced = Priced(Path("run"), compile_graph("grpo", (), 2), load_cluster("cpu"), 12.0)
    lines = [{"rollout/prompt_length": length, "rollout/length": 20.0} for length in (30.0, 50.0)]
    assert priced.work(lines).prompt == prompt_tokens(lines) == 40
    assert priced.work(lines).responses.mean == 20
    assert priced.work([{"rollout/length": 20.0}]).prompt == pytest.approx(12), "an older run: as was given"
    assert prompt_tokens([{"step": 1}]) is None
