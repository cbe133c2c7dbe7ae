"""The estimator of a graph that `rlgraph import verl` writes gives what verl's own function gives.

What verl gave for the same settings stands in tests/peers/recorded/verl_advantages.json, with its version.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.frontend.compose import compose
from rlgraph.importing.verl import import_verl
from rlgraph.nodes import OPS
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context
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


@pytest.mark.parametrize("name", RECORDED["alone"])
def test_one_sample_of_a_prompt_has_the_advantage_that_verl_gives_it(name: str, tmp_path: Path) -> None:
    case, rows = RECORDED["alone"][name], RECORDED["rows"]
    imported = import_verl(None, [FUNCTION, *case["typed"]])  # verl's default of rollout.n is 1
    assert any(o.key == "rollout.n" and o.kind == "hand" for o in imported.outcomes)
    graph = tmp_path / "out.yaml"
    graph.write_text(imported.graph())
    nodes = dict(compose(str(graph)).plain()["nodes"])
    loss_mask = Ragged.of([[True] * n for n in LENGTHS], torch.bool)
    placed = called(nodes["token_rewards"], rewards=torch.tensor(rows["rewards"]), loss_mask=loss_mask)
    assert nodes["advantages"]["in"] == {"rewards": "token_rewards"}
    advantages = called(nodes["advantages"], rewards=placed, loss_mask=loss_mask)
    expected = [number for row, n in zip(case["advantages"], LENGTHS, strict=True) for number in row[:n]]
    assert advantages.values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def called(node: Mapping[str, Any], **columns: Any) -> Any:
    """What a node of a graph makes of some columns; those of a KL are left out."""
    op = load(OPS[node["op"]], node["op"])
    given = {name: value for name, value in node.items() if name not in ("op", "in")}
    attributes = op.attributes(**given).model_dump()
    reads = inspect.signature(op.body).parameters
    left_out = {name: None for name in ("old_logprobs", "ref_logprobs") if name in reads}
    ctx = {"ctx": Context("node", 0, 0)} if "ctx" in reads else {}
    return op.body(**ctx, **left_out, **columns, **attributes)
