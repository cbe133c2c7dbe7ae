"""The loss of a graph that `rlgraph import verl` writes has the value and gradient of verl's own function.

What verl gave for the same settings stands in tests/peers/recorded/verl_losses.json, with its version.
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
from rlgraph.nodes import LOSSES, OPS
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context, Loss, Totals
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


def nodes_of(typed: list[str], path: Path, release: str = "") -> dict[str, Any]:
    path.write_text(import_verl(None, [*GRPO, *typed], release=release).graph())
    return dict(compose(str(path)).plain()["nodes"])


def update_of(typed: list[str], path: Path, release: str = "") -> dict[str, Any]:
    return dict(nodes_of(typed, path, release)["update_policy"])


def recorded_columns() -> dict[str, Ragged]:
    columns = {name: ragged(rows) for name, rows in RECORDED["rows"].items()}
    columns["loss_mask"] = columns["logprobs"].like(columns.pop("mask").values.bool())
    return columns


def made_by(node: Mapping[str, Any], columns: Mapping[str, Ragged]) -> Ragged:
    """What a node of a graph makes of columns, all rows in one mini-batch."""
    op = load(OPS[node["op"]], node["op"])
    given = {name: value for name, value in node.items() if name not in ("op", "minibatches")}
    reads = [name for name in inspect.signature(op.body).parameters if name in columns]
    ctx = Context("node", 0, 0, rows=range(4), total_rows=4)
    return op.body(ctx, **{name: columns[name] for name in reads}, **op.attributes(**given).model_dump())


def loss_and_gradient(
    update: dict[str, Any], more: Mapping[str, Ragged] | None = None
) -> tuple[float, list[float]]:
    """The objective of an update on the recorded rows: its loss, and the gradient by token."""
    attributes = dict(update["loss"])
    op = load(LOSSES[attributes["kind"]], attributes.pop("kind"), Loss)
    loss = Loss(op.body, op.attributes(**attributes).model_dump(), {})
    columns = {**recorded_columns(), **(more or {})}
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


COVARIANCE = [name for name in RECORDED["cases"] if "_cov" in name]


@pytest.mark.parametrize("name", COVARIANCE)
def test_the_imported_loss_of_covariance_is_verls(name: str, tmp_path: Path) -> None:
    """verl chooses tokens by the log-probs of now, which in an iteration's first step are the old ones.

    Of tokens whose ratio is clipped verl's Clip-Cov chooses none: the loss is another, by a constant, and the
    gradient of both is 0.
    """
    case, columns = RECORDED["cases"][name], recorded_columns()
    nodes = nodes_of(case["typed"], tmp_path / "out.yaml")
    now = {**columns, "old_logprobs": columns["logprobs"]}
    restrained = made_by(nodes["restrained"], now)
    assert 0 < int(restrained.values.sum()) < int(columns["loss_mask"].values.sum())
    is_first = name.endswith("first step")
    more = {"restrained": restrained} | ({"old_logprobs": columns["logprobs"]} if is_first else {})
    value, gradient = loss_and_gradient(nodes["update_policy"], more)
    assert gradient == pytest.approx(written(case["gradient"]), rel=1e-5, abs=1e-6)
    if is_first or name.startswith("kl_cov"):
        assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    unrestrained = {"restrained": columns["loss_mask"].like(torch.zeros_like(restrained.values))}
    _, plain = loss_and_gradient(nodes["update_policy"], more | unrestrained)
    if name != "kl_cov first step":  # where a token has not moved, its KL has no gradient
        assert plain != pytest.approx(gradient, rel=1e-2), "which tokens are chosen shows"


@pytest.mark.parametrize("limit", RECORDED["distilled"])
def test_a_teacher_teaches_as_in_verl(limit: str, tmp_path: Path) -> None:
    case, columns = RECORDED["distilled"][limit], recorded_columns()
    nodes = nodes_of(case["typed"], tmp_path / "out.yaml")
    columns["old_logprobs"] = columns["logprobs"]
    columns["teacher_logprobs"] = columns["ref_logprobs"]
    advantages = made_by(nodes["advantages"], columns)
    assert (float(advantages.values.abs().max()) < 0.301) == (limit != "None")
    assert nodes["update_policy"]["loss"] == {
        "kind": "ppo_clip",
        "clip": 0.1,
        "clip_high": 0.3,
        "dual_clip": 3.0,
    }
    more = {"advantages": advantages, "old_logprobs": columns["logprobs"]}
    value, gradient = loss_and_gradient(nodes["update_policy"], more)
    assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    assert gradient == pytest.approx(written(case["gradient"]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in RECORDED["cases"] if name not in COVARIANCE])
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
