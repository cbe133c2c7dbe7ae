"""Metrics of whole runs: alike on one and two devices and in rounds, told apart by node, of one kind."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cadenced import HERE, graph, ran

from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph

OPS = HERE / "metric_ops.py"
KINDS = f"insert: {{kinds: {{op: '{OPS}:kinds', on: rewards}}}}"
ROWS = 12  # of an iteration
PPO = "set: {models.critic.path: demo_files/model, models.critic.optimizer: {lr: 1e-3}}"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def second(op: str) -> str:
    return f"insert: {{second: {{op: '{OPS}:{op}', on: kinds, in: {{rewards: kinds}}}}}}"


def on(devices: int) -> str:
    return f"set: {{pools: {{main: {{devices: {devices}}}}}}}"


def level(line: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("level/"): value for name, value in line.items() if name.startswith("level/")}


def test_a_run_has_what_statistics_says() -> None:
    for line in ran(graph("grpo", on(1), KINDS), "run", steps=2):
        values = [math.sin(row * 0.7 + line["step"] - 1) for row in range(ROWS)]
        expected = {
            "mean": statistics.fmean(values),
            "std": statistics.pstdev(values),
            "min": min(values),
            "max": max(values),
            "over_half": sum(value > 0.5 for value in values) / ROWS,
            "rows": ROWS,
        }
        found = level(line)
        ranks = {"p10": sorted(values)[1], "p50": sorted(values)[5]}
        assert {name: found.pop(name) for name in ranks} == pytest.approx(ranks, rel=1 / 512)
        assert found == pytest.approx(expected, rel=1e-14)
        assert line["reward/min"] <= line["reward/mean"] <= line["reward/max"] or not line["reward/std"]
        assert line["rollout/length_min"] <= line["rollout/length"] <= line["rollout/length_max"] <= 6


@pytest.mark.slow
def test_devices_show_in_no_metric(run_on_devices: Callable[..., str]) -> None:
    lines = []
    for devices in (1, 2):
        path = graph("ppo", on(devices), PPO, KINDS, "set: {update_policy.minibatches: 2}")
        run_on_devices(path, "--devices", str(devices), "--steps", "1", "--run-dir", f"on-{devices}")
        text = Path(f"on-{devices}/metrics.jsonl").read_text()
        lines.append(json.loads(text.splitlines()[0]))
    one, two = ({k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines)
    assert level(one) == level(two) and len(level(one)) == 8, "in every digit"
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    assert {"update_critic/explained_variance", "update_policy/kl_old", "reward/std"} <= one.keys()
    assert -10 < one["update_critic/explained_variance"] < 1


def test_nodes_add_to_a_sum_and_have_their_own_means() -> None:
    (line,) = ran(graph("grpo", on(1), KINDS, second("more_rows")), "run", steps=1)
    assert line["level/rows"] == 2 * ROWS
    assert line["second/level/mean"] == 3.0 and abs(line["level/mean"]) < 1


def test_a_name_is_of_one_kind(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(RunError) as raised:
        run_graph(graph("grpo", on(1), KINDS, second("largest")), (), 1, inline=True, steps=1)
    golden("metrics/two_kinds.txt", f"{raised.value}\n")
