"""Runs in which losses join an update: on one and two devices, resumed, replayed, and with one not finite."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cadenced import HERE, checkpoint, graph, ran, same

from rlgraph.errors import RunError
from rlgraph.runtime.replay import replay

EXAMPLES_NODE = """\
add:
      examples:
        op: data.examples
        files: [demo_files/train.parquet]
        batch: 3
        template: plain
        out: {tokens: example_tokens, loss_mask: example_mask}
      imitate:
        op: update.policy
        model: policy
        loss: {kind: sft}
        in: {tokens: example_tokens, loss_mask: example_mask, ref_logprobs: example_ref}
        kl_coef: {adaptive: 0.1, target: 0.001, horizon: 10}
        weight: {linear: [0.5, 0.1], over: 4}
        joins: update_policy
      example_ref: {op: logprobs, model: ref, in: {tokens: example_tokens, loss_mask: example_mask}}
      repeated: {op: update.policy, model: policy, loss: {kind: sft}, weight: 0.2, joins: update_policy}"""


@pytest.fixture
def in_folder(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def joined(*edits: str) -> str:
    lead = "set: {update_policy.minibatches: 2, update_policy.epochs: 2, schedule.record_every: 1}"
    return graph("grpo", lead, EXAMPLES_NODE, "set: {old_logprobs.rows: rollout}", *edits)


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder")
def test_a_run_on_two_devices_is_that_on_one(run_on_devices: Callable[..., str]) -> None:
    runs = []
    for devices in ("1", "2"):
        run_on_devices(joined(), "--devices", devices, "--run-dir", devices)
        runs.append([json.loads(line) for line in Path(devices, "metrics.jsonl").read_text().splitlines()])
    for one, two in zip(*runs, strict=True):
        assert {"imitate/entropy", "imitate/kl_ref", "repeated/loss"} <= one.keys()
        assert not {"imitate/grad_norm", "imitate/lr", "imitate/skipped"} & one.keys()
        for name in (name for name in one if name.startswith(("imitate/", "repeated/", "update_policy/"))):
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name
    assert [line["imitate/weight"] for line in runs[0]] == pytest.approx([0.5, 0.4, 0.3, 0.2])
    # the coefficient follows the KL that the lead's step measures for it
    assert len({line["imitate/kl_coef"] for line in runs[0]}) == 4
    state = json.loads(Path("1/checkpoints/step-000004/state.json").read_text())
    assert state["versions"]["policy"] == 4


@pytest.mark.usefixtures("in_folder")
def test_a_resumed_run_is_the_same() -> None:
    lines = ran(joined(), "whole")
    shutil.copytree("whole", "half")
    for later in ("step-000003", "step-000004"):
        shutil.rmtree(f"half/checkpoints/{later}")
    assert ran(joined(), "half", resume=True) == lines
    assert same(checkpoint("half", 4), checkpoint("whole", 4))


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("node", ["imitate", "repeated", "update_policy"])
def test_a_replay_has_all_terms(node: str) -> None:
    ran(joined(), "run")
    results = {one.name: one for _, found in replay(Path("run"), 3, node).steps for one in found}
    assert all(one.same for one in results.values()), results
    assert {"update_policy/grad_norm", "imitate/loss", "repeated/loss"} <= {*results}


@pytest.mark.usefixtures("in_folder")
def test_a_term_that_is_not_finite_is_named() -> None:
    broken = f"replace: {{imitate.loss: {{kind: '{HERE / 'ones_ops.py'}:steep'}}}}"
    stops = "set: {schedule.on_nan: dump, imitate.in.advantages: example_ref}"
    with pytest.raises(RunError, match="a loss or gradient was not finite"):
        ran(joined(broken, stops), "run")
    infinite = f"replace: {{imitate.loss: {{kind: '{HERE / 'ones_ops.py'}:endless'}}}}"
    with pytest.raises(RunError, match="`imitate`: a loss or gradient was not finite"):
        ran(joined(infinite, "set: {schedule.on_nan: dump}"), "other")
    (path,) = Path("other/dumps").iterdir()
    assert "imitate" in path.name and len(path.read_text().splitlines()) == 2 * 3  # epochs, rows
