"""An iteration that runs again from recorded columns gives what the run had, or says what is different."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.runtime.replay import Replayed, replay
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
GRAPH = f"""
graph: watched
extends: grpo
edits:
  - set: {{models.policy: {{path: demo_files/model, optimizer: {{lr: 1e-3}}}}}}
  - replace: {{prompts: {{op: data.prompts, files: [demo_files/train.parquet], batch: 4, template: plain}}}}
  - set: {{rollout.n: 4, rollout.max_new_tokens: 6, update_policy.minibatches: 2}}
  - set: {{rewards: {{op: '{HERE / "recorded_ops.py"}:scaled'}}, schedule: {{iterations: 3}}}}
  - set: {{schedule.record_every: 1, schedule.save_every: 1, schedule.keep: 2}}
  - add: {{mixed: {{op: filter.mixed}}, refresh: {{op: update.copy, model: ref, of: policy@next, every: 2}}}}
  - set: {{advantages.rows: mixed}}
"""


@pytest.fixture(scope="module", autouse=True)
def _run(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run of three iterations, with checkpoints after the last two, in the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("replay"))
        Path("demo_files").symlink_to(demo_files / "demo_files")
        Path("watched.yaml").write_text(GRAPH)
        run_graph("watched.yaml", (), 1, inline=True, run_dir=Path("run"))
        yield


def different(found: Replayed) -> list[str]:
    return [one.name for _, results in found.steps for one in results if not one.same]


def test_an_update_that_runs_again_gives_the_same_metrics_and_weights() -> None:
    found = replay(Path("run"), 3, "update_policy", export=Path("again"))
    assert [step.node for step, _ in found.steps] == ["update_policy"]
    assert not different(found)
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    names = {one.name for _, results in found.steps for one in results}
    assert names == {name for name in line if name.startswith("update_policy/")}
    one, other = (load_file(f"{d}/policy/model.safetensors") for d in ("again", "run/models"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("iteration", "node"), [(1, "prompts"), (3, "prompts"), (3, "advantages")])
def test_it_begins_with_any_node_whose_weights_there_are(iteration: int, node: str) -> None:
    found = replay(Path("run"), iteration, node)
    nodes = [step.node for step, _ in found.steps]
    assert (nodes[0], nodes[-1]) == (node, "update_policy")
    assert len(nodes) > 1 and not different(found)
    assert "results are those of the run" in str(found)


def test_what_is_different_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SCALE", "2")
    found = replay(Path("run"), 3, "rewards")
    told = different(found)
    assert {"rewards", "reward/mean"} <= {*told}
    assert "old_logprobs" not in told  # the rollout was not run again, and they are of the same weights
    (line,) = [line for line in str(found).splitlines() if " rewards " in line and "now" in line]
    assert line.startswith("     * rewards") and "of them others, by" in line


def test_the_run_is_left_as_it_was() -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()}
    result = CliRunner().invoke(main, ["replay", "run", "--step", "1", "--from", "update_policy"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(
        "iteration 1 of run, again from `update_policy`, with the weights of the mod"
    )
    assert "the same" in result.output and "*" not in result.output
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("iteration", "node", "said"),
    [
        (
            4,
            "advantages",
            "needs `prompt` of iteration 4, which was not recorded\n  recorded iterations: 1, 2, 3",
        ),
        (3, "advantage", "has no node `advantage`\n  begin with one of .*\n  did you mean `advantages`"),
        (
            2,
            "rollout",
            "no checkpoint after iteration 1, with which iteration 2 began\n  iterations with .* 1, 3 ",
        ),
        (3, "refresh", "`refresh` does not run in iteration 3"),
        (
            2,
            "refresh",
            "`refresh` reads policy@v\\+1, which `update_policy` makes\n  begin with `update_policy`",
        ),
    ],
)
def test_what_can_not_run_again_is_named(iteration: int, node: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        replay(Path("run"), iteration, node)


@pytest.mark.parametrize("text", [GRAPH.replace("lr: 1e-3", "lr: 1e-4"), None])
def test_the_folder_of_a_run_is_enough_wherever_one_is(text: str | None, tmp_path: Path) -> None:
    """Its graph's file may have changed or be gone."""
    folder = Path.cwd()
    Path("watched.yaml").unlink()
    if text is not None:
        Path("watched.yaml").write_text(text)
    try:
        assert not different(replay(Path("run"), 3, "update_policy"))
        os.chdir(tmp_path)
        assert not different(replay(folder / "run", 3, "update_policy"))
    finally:
        os.chdir(folder)
        Path("watched.yaml").write_text(GRAPH)


def test_another_graph_than_that_of_the_run_is_refused() -> None:
    kept = Path("run/graph.yaml").read_text()
    Path("run/graph.yaml").write_text(kept.replace("lr: 0.001", "lr: 1e-4"))
    try:
        with pytest.raises(RunError, match=r"run/graph.yaml is no longer the graph that run was made from"):
            replay(Path("run"), 3, "update_policy")
    finally:
        Path("run/graph.yaml").write_text(kept)
    with pytest.raises(RunError, match="nowhere holds no run"):
        replay(Path("nowhere"), 3, "update_policy")
    assert os.path.isdir("run/recorded/step-000003")


def test_what_a_region_collected_is_recorded_and_run_on_again() -> None:
    edits = "  - set: {mixed.refill: true, schedule: {iterations: 1, record_every: 1}}\n"
    Path("refilled.yaml").write_text(GRAPH + edits)
    run_graph("refilled.yaml", (), 1, inline=True, run_dir=Path("refilled"))
    found = replay(Path("refilled"), 1, "advantages")
    assert [step.node for step, _ in found.steps] == ["advantages", "update_policy"]
    assert not different(found)
    with pytest.raises(RunError, match="`rewards` does not run in iteration 1, it is repeated until `mixed`"):
        replay(Path("refilled"), 1, "rewards")
