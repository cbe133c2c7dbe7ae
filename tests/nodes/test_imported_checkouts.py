"""The losses of graphs that `rlgraph import areal` and `nemo-rl` write are those of the systems themselves.

What their own functions gave for the same settings stands in tests/peers/recorded, with the commits that were
asked.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_policy_losses_of_peers as policy

from rlgraph.check import check_report
from rlgraph.frontend.compose import compose
from rlgraph.importing.areal import import_areal
from rlgraph.importing.importer import Imported
from rlgraph.importing.nemo_rl import import_nemo_rl
from rlgraph.nodes import OPS
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context
from rlgraph.ops.registry import load
from rlgraph.request import PlanRequest

RECORDED = Path(__file__).parents[1] / "peers/recorded"
AREAL = json.loads((RECORDED / "areal_losses.json").read_text())
NEMO = json.loads((RECORDED / "nemo_rl_losses.json").read_text())
GENERATION = ("rollout.backend=sglang:d4", "actor.backend=fsdp:d4", "gconfig.n_samples=4")
TRAINING = (
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=4",
    "policy.max_total_sequence_length=64",
)
CORRECTIONS = ("weights", "rollout_weights")  # one reads the other


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def typed(section: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings of a section as ``key=value``, nested ones too."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            words += typed(f"{section}.{name}", value)
        else:
            words.append(f"{section}.{name}={json.dumps(value)}")
    return words


def nodes_of(imported: Imported) -> dict[str, Any]:
    Path("out.yaml").write_text(imported.graph())
    report = check_report(PlanRequest("out.yaml"))
    assert not report["problems"], report
    return dict(compose("out.yaml").plain()["nodes"])


def loss_and_gradient(
    nodes: Mapping[str, Any], recorded: Mapping[str, Any], moved: bool = True
) -> tuple[float, list[float]]:
    """The objective of a graph's update on recorded rows, with the weights that its corrections write."""
    update, columns = nodes["update_policy"], policy.columns(dict(recorded))
    if not moved:
        columns["old_logprobs"] = columns["logprobs"]
    columns["ref_logprobs"] = columns["rollout_logprobs"].like(columns["rollout_logprobs"].values - 0.3)
    for name in (name for name in CORRECTIONS if name in nodes):
        op = load(OPS[nodes[name]["op"]], nodes[name]["op"])
        given = {key: value for key, value in nodes[name].items() if key in op.attributes.model_fields}
        reads = inspect.signature(op.body).parameters
        chosen = {port: columns.get(port) for port in reads if port in (*columns, "weights")}
        columns[name] = op.body(Context(name, 0, 0), **chosen, **op.attributes(**given).model_dump())
    for port, source in update.get("in", {}).items():
        columns[port] = columns[source]
    if not update.get("kl_coef"):
        del columns["ref_logprobs"]
    loss = dict(update["loss"])
    objective = policy_objective(
        policy.policy_loss(loss.pop("kind"), **loss),
        update["aggregate"],
        update.get("kl_coef", 0.0),
        update.get("kl", "k3"),
        0.0,
        update.get("norm"),
        update.get("kl_unbiased", False),
    )
    if "old_logprobs" not in nodes and "old_logprobs" not in update.get("in", {}):
        del columns["old_logprobs"]
    value, gradient, _ = policy.gradient_of(objective, columns)
    return value, [number for row in gradient for number in row]


def mask_of(recorded: Mapping[str, Any]) -> Ragged:
    return policy.columns(dict(recorded))["loss_mask"]


@pytest.mark.parametrize("name", AREAL["cases"])
def test_a_loss_of_areal_is_its_own(name: str) -> None:
    case = AREAL["cases"][name]
    imported = import_areal(None, [*GENERATION, *typed("actor", case["actor"])])
    value, gradient = loss_and_gradient(nodes_of(imported), AREAL["rows"])
    assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    expected = policy.flat(case["gradient"], mask_of(AREAL["rows"]))
    assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NEMO["cases"])
def test_a_loss_of_nemo_rl_is_its_own(name: str) -> None:
    case = NEMO["cases"][name]
    imported = import_nemo_rl(None, [*TRAINING, *typed("loss_fn", case["loss_fn"])])
    value, gradient = loss_and_gradient(nodes_of(imported), NEMO["rows"], case["moved"])
    assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    expected = policy.flat(case["gradient"], mask_of(NEMO["rows"]))
    assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-6)
