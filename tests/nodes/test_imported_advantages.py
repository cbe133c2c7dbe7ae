"""The estimator of a graph that `rlgraph import verl` writes gives what verl's own function gives.

What verl gave for the same settings stands in tests/peers/recorded/verl_advantages.json, with its version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlgraph.frontend.compose import compose
from rlgraph.importing.verl import import_verl
from rlgraph.nodes import OPS
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.registry import load

RECORDED = json.loads((Path(__file__).parents[1] / "peers/recorded/verl_advantages.json").read_text())
LENGTHS = RECORDED["rows"]["lengths"]
FUNCTION = "custom_reward_function.path=verl_reward.py"


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_the_imported_estimator_is_verls(name: str, tmp_path: Path) -> None:
    case, rows = RECORDED["cases"][name], RECORDED["rows"]
    graph = tmp_path / "out.yaml"
    graph.write_text(import_verl(None, [FUNCTION, "actor_rollout_ref.rollout.n=4", *case["typed"]]).graph())
    node = dict(compose(str(graph)).plain()["nodes"]["advantages"])
    op = load(OPS[node["op"]], node.pop("op"))
    inputs = node.pop("in", {})
    columns = {
        "rewards": torch.tensor(rows["rewards"]),
        "group": torch.tensor([sorted(set(rows["groups"])).index(group) for group in rows["groups"]]),
        "loss_mask": Ragged.of([[True] * n for n in LENGTHS], torch.bool),
    }
    if inputs:
        columns["rewards_2"] = torch.tensor(rows["forms"])
    if "gdpo" in name:
        columns |= {"rewards_3": None, "rewards_4": None}
    advantages = op.body(**columns, **op.attributes(**node).model_dump())
    expected = [number for row, n in zip(case["advantages"], LENGTHS, strict=True) for number in row[:n]]
    assert advantages.values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
