"""Losses of pairs and of labels against TRL's own, by values and gradients: ask_trl_preferences.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recorded import means
from rlgraph.nodes import PAIR_LOSSES
from rlgraph.nodes.loss.policy import aggregate
from rlgraph.nodes.loss.preference import dpo_weights, kto_weights, preference
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, PairLoss, Totals
from rlgraph.ops.registry import load

TRL = json.loads((Path(__file__).parents[1] / "peers/recorded/trl_preferences.json").read_text())
ROWS = {name: torch.tensor(column, dtype=torch.float64) for name, column in TRL["rows"].items()}
MASK = ROWS["mask"].bool()
PAIRS = len(MASK) // 2
CHOSEN = torch.arange(2 * PAIRS) < PAIRS
GROUP = torch.arange(2 * PAIRS) % PAIRS
EXACT = {"atol": 1e-6, "rtol": 1e-5}
# what TRL calls a loss -> our kind, and its attributes by TRL's settings
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "sigmoid": ("sigmoid", {}),
    "hinge": ("hinge", {}),
    "ipo": ("ipo", {}),
    "exo_pair": ("exo", {"smoothing": "label_smoothing"}),
    "nca_pair": ("nca", {}),
    "robust": ("robust", {"smoothing": "label_smoothing"}),
    "bco_pair": ("bco", {}),
    "sppo_hard": ("sppo", {}),
    "aot": ("aot", {"smoothing": "label_smoothing"}),
    "aot_unpaired": ("aot_unpaired", {"smoothing": "label_smoothing"}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
    "discopop": ("discopop", {"tau": "discopop_tau"}),
    "sft": ("likelihood", {}),
    "sigmoid_norm": ("sigmoid", {"mean": ""}),
}
DIVERGENCES = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}


def ragged(name: str) -> Ragged:
    """Return a column of rows that begin with a token of the prompt, which is not learnt."""
    rows = [[0.0, *row[kept].tolist()] for row, kept in zip(ROWS[name], MASK, strict=True)]
    return Ragged.of(rows, torch.float32)


def loss_mask() -> Ragged:
    return Ragged.of([[False, *[True] * int(kept.sum())] for kept in MASK], torch.bool)


def pair_loss(kind: str, **attributes: Any) -> PairLoss:
    return PairLoss(load(PAIR_LOSSES[kind], kind, PairLoss).body, attributes, {})


def gradient_of(weights: Ragged) -> list[list[float]]:
    """Return the gradient that update.policy has of the column, per token of the response."""
    mask = loss_mask()
    values = ragged("logprobs").values.clone().requires_grad_()
    totals = Totals(tokens=int(mask.values.sum()), sequences=2 * PAIRS)
    losses = preference(mask.like(values), weights)
    (gradient,) = torch.autograd.grad(aggregate(losses, mask, totals, "seq-mean-token-sum"), values)
    return [row[1:] for row in mask.like(gradient).tolist()]


def check(case: dict[str, Any], weights: Ragged, ctx: Context) -> None:
    total, count = means(ctx)["preference/loss"]
    assert total / count == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    theirs = torch.tensor(case["gradient"])
    for row, gradient in enumerate(gradient_of(weights)):
        torch.testing.assert_close(torch.tensor(gradient), theirs[row][MASK[row]], **EXACT)


@pytest.mark.parametrize("name", TRL["dpo"])
def test_losses_of_pairs_are_those_of_trl(name: str) -> None:
    case, ctx = TRL["dpo"][name], Context(node="preference", seed=0, iteration=0)
    settings = {"beta": 0.1, "discopop_tau": 0.05, "label_smoothing": 0.0, **case["settings"]}
    kinds = settings.get("loss_type", ["sigmoid"])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    losses = {}
    for kind in kinds:
        ours, attributes = KINDS[kind]
        losses[kind] = pair_loss(ours, **{a: settings[key] if key else True for a, key in attributes.items()})
    attributes = {"divergence": DIVERGENCES.get(settings.get("f_divergence_type", ""), "reverse_kl")}
    weights, _ = dpo_weights(
        ctx,
        ragged("logprobs"),
        ragged("ref_logprobs"),
        loss_mask(),
        CHOSEN,
        GROUP,
        ragged("squares") if settings.get("use_weighting") else None,
        beta=settings["beta"],
        losses=losses,
        weights=dict(zip(kinds, settings["loss_weights"], strict=True))
        if "loss_weights" in settings
        else None,
        alpha=settings.get("f_alpha_divergence_coef", 0.5),
        tail=settings.get("ld_alpha", 1.0),
        **attributes,
    )
    check(case, weights, ctx)


@pytest.mark.parametrize("name", TRL["kto"])
def test_losses_of_labels_are_those_of_trl(name: str) -> None:
    case, ctx = TRL["kto"][name], Context(node="preference", seed=0, iteration=0)
    settings = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **case["settings"]}
    drift = settings.get("loss_type", "kto") == "kto"
    columns = (ragged("kl_logprobs"), ragged("kl_ref_logprobs"), loss_mask()) if drift else (None, None, None)
    weights = kto_weights(
        ctx,
        ragged("logprobs"),
        ragged("ref_logprobs"),
        loss_mask(),
        *columns,
        CHOSEN,
        beta=settings["beta"],
        weight=settings["desirable_weight"],
        weight_undesirable=settings["undesirable_weight"],
        drift=drift,
    )
    check(case, weights, ctx)


@pytest.mark.parametrize("name", TRL["cpo"])
def test_losses_without_a_reference_are_those_of_trl(name: str) -> None:
    case, ctx = TRL["cpo"][name], Context(node="preference", seed=0, iteration=0)
    settings = {
        "loss_type": "sigmoid",
        "beta": 0.1,
        "cpo_alpha": 1.0,
        "label_smoothing": 0.0,
        **case["settings"],
    }
    kind, smoothing, alpha = settings["loss_type"], settings["label_smoothing"], settings.get("alpha", 0.0)
    divergence = {}
    if kind == "simpo":
        margin = settings.get("simpo_gamma", 0.5)
        if alpha:
            loss = pair_loss("alphapo", alpha=alpha, margin=margin, smoothing=smoothing)
        else:
            loss = pair_loss("sigmoid", mean=True, margin=margin, smoothing=smoothing)
    else:
        loss = pair_loss(kind, **({"smoothing": smoothing} if kind == "sigmoid" else {}))
        if alpha:
            divergence = {"divergence": "alpha", "alpha": 1 - alpha}
    weights, _ = dpo_weights(
        ctx,
        ragged("logprobs"),
        None,
        loss_mask(),
        CHOSEN,
        GROUP,
        None,
        beta=settings["beta"],
        losses={"pairs": loss, "fit": pair_loss("likelihood")},
        weights={"fit": settings["cpo_alpha"]},
        reference=False,
        **divergence,
    )
    check(case, weights, ctx)


def test_every_loss_of_pairs_is_held_to_trl() -> None:
    assert {*PAIR_LOSSES} == {kind for kind, _ in KINDS.values()} | {"alphapo"}
