"""The loss of a graph that `rlgraph import verl` writes has the value and gradient of verl's own function.

What verl gave for the same settings stands in tests/peers/recorded/verl_losses.json, with its version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.frontend.compose import compose
from rlgraph.importing.verl import import_verl
from rlgraph.nodes import LOSSES
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Loss, Totals
from rlgraph.ops.registry import load

RECORDED = json.loads((Path(__file__).parents[1] / "peers/recorded/verl_losses.json").read_text())
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.max_response_length=8")


def ragged(rows: list[list[float]]) -> Ragged:
    """A column of the tokens that are in the mask, each row led by a token of the prompt."""
    lengths = [int(sum(row)) for row in RECORDED["rows"]["mask"]]
    return Ragged.of([[0.0, *row[:n]] for row, n in zip(rows, lengths, strict=True)], torch.float64)


def written(rows: list[list[float]]) -> list[float]:
    lengths = [int(sum(row)) for row in RECORDED["rows"]["mask"]]
    return [number for row, n in zip(rows, lengths, strict=True) for number in row[:n]]


def update_of(typed: list[str], path: Path, release: str = "") -> dict[str, Any]:
    path.write_text(import_verl(None, [*GRPO, *typed], release=release).graph())
    return dict(compose(str(path)).plain()["nodes"]["update_policy"])


def loss_and_gradient(update: dict[str, Any]) -> tuple[float, list[float]]:
    """The objective of an update on the recorded rows: its loss, and the gradient by token."""
    attributes = dict(update["loss"])
    op = load(LOSSES[attributes["kind"]], attributes.pop("kind"), Loss)
    loss = Loss(op.body, op.attributes(**attributes).model_dump(), {})
    columns = {name: ragged(rows) for name, rows in RECORDED["rows"].items()}
    columns["loss_mask"] = columns["logprobs"].like(columns.pop("mask").values.bool())
    for name, source in update.get("in", {}).items():
        columns[name] = columns[source]
    for name in ("rollout_logprobs", *(() if update.get("kl_coef") else ("ref_logprobs",))):
        del columns[name]
    objective = policy_objective(
        loss, update["aggregate"], update.get("kl_coef", 0.0), update.get("kl", "k3"), 0.0, update.get("norm")
    )
    logprobs = columns["logprobs"].values.clone().requires_grad_()
    mask = columns["loss_mask"]
    totals = Totals(int(mask.values.sum()), len(mask))
    value, _ = objective({**columns, "logprobs": mask.like(logprobs)}, totals)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.item(), gradient[mask.values].tolist()


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_the_imported_loss_is_verls(name: str, tmp_path: Path) -> None:
    case = RECORDED["cases"][name]
    value, gradient = loss_and_gradient(update_of(case["typed"], tmp_path / "out.yaml"))
    assert gradient == pytest.approx(written(case["gradient"]), rel=1e-5, abs=1e-6)
    if not name.endswith("+"):  # of these only the gradient is the same: the value is that of k2
        assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)


def test_gspo_of_the_main_branch_has_one_mean(tmp_path: Path) -> None:
    """verl's main branch (1dda039, 2026-08-22) averages it by seq-mean-token-mean whatever is typed."""
    typed = RECORDED["cases"]["gspo token-mean"]["typed"]
    same = RECORDED["cases"]["gspo seq-mean-token-mean"]
    _, gradient = loss_and_gradient(update_of(typed, tmp_path / "out.yaml", "main"))
    assert gradient == pytest.approx(written(same["gradient"]), rel=1e-5, abs=1e-6)
