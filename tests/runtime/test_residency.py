"""A cluster with too little memory for all engines: the planner moves them, and no number changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.memory import Footprint
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.ir.plan import Target
from rlgraph.planning.offload import reside
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
# small batches, so that what engines hold is most of it
SMALL = (
    "models.policy.serve.max_rows=8",
    "models.policy.train.micro_tokens=64",
    "models.ref.train.micro_tokens=64",
)
AHEAD = ("schedule.buffer={staleness: 1, by: batch}", "update_policy.in.old_logprobs=rollout_logprobs")


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    monkeypatch.chdir(tmp_path)
    # what a prefill takes hides what such small models hold: leave it out of account
    monkeypatch.setattr("rlgraph.costs.limits.PREFILL", 1)


def tight(graph: str, *settings: str) -> str:
    """A cluster file whose devices hold what the graph needs with every move that helps, and no more."""
    plan = compile_graph(graph, settings, 1)
    cluster = load_cluster("cpu").model_copy(update={"memory": 1.0, "margin": 0.0})
    cramped = Footprint(plan, cluster, workload(plan), sizes_of(plan))
    least = max(peak.bytes for peak in replace(cramped, plan=reside(cramped)).peaks().values())
    text = (FOLDER / "cpu.yaml").read_text(encoding="utf-8")
    text = text.replace("cluster: cpu", "cluster: tight").replace(
        "memory: 4e9", f"memory: {least}\nmargin: 0", 1
    )
    Path("tight.yaml").write_text(text, encoding="utf-8")
    return "tight.yaml"


def run(graph: str, settings: tuple[str, ...], name: str, cluster: str | None = None) -> list[dict[str, Any]]:
    target = Target(cluster) if cluster else None
    folder = run_graph(graph, settings, 1, run_dir=Path(name), inline=True, target=target)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("time/", "perf/"))}
        for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "settings"),
    [(ONE, ()), (TWO, AHEAD), (TWO, (*AHEAD, "schedule.buffer={staleness: 2, by: batch}"))],
    ids=["one pool", "one ahead", "two ahead"],
)
def test_moves_change_no_number(graph: str, settings: tuple[str, ...]) -> None:
    settings = (*SMALL, *settings, "schedule.iterations=3")
    free = run(graph, settings, "free")
    held = run(graph, settings, "held", tight(graph, *settings))
    plan = json.loads(Path("held/plan.json").read_text())
    kinds = {step["kind"] for step in plan["steps"]}
    assert {"offload", "load"} <= kinds, kinds
    assert held == free
    one, other = (load_file(f"{name}/models/policy/model.safetensors") for name in ("free", "held"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_saved_plan_with_moves_is_run_as_it_was_planned() -> None:
    from click.testing import CliRunner

    from rlgraph.cli.main import main

    settings = (*SMALL, "schedule.iterations=2")
    where = ["--cluster", tight(ONE, *settings)]
    assert CliRunner().invoke(main, ["plan", ONE, *settings, *where, "-o", "plan.json"]).exit_code == 0
    folder = run_graph("plan.json", run_dir=Path("saved"))
    timeline = (folder / "timeline.json").read_text()
    assert '"cat": "offload"' in timeline and '"cat": "load"' in timeline
