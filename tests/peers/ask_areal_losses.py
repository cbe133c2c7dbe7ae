"""AReaL's own policy losses under settings as a user writes them: value and gradient, of a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from checkout import definitions, folder_of

PEERS: list[str] = []
REPOSITORY, COMMIT = "inclusionAI/AReaL", "4aef98d8d818af55b43621aaadba047ae10f4e77"  # 2026-05-21
CHECKOUTS = {REPOSITORY: COMMIT}
FUNCTIONS = (
    "_compute_sequence_level_ratio_and_advantages",
    "RejectionSamplingResult",
    "_check_bounds",
    "apply_rejection_sampling",
    "ppo_actor_loss_fn",
    "sapo_loss_fn",
)
ROWS, TOKENS = 4, 6
LENGTHS = [6, 4, 5, 2]
REJECTS = "rejection_sampling"
BOUNDS = {"upper": 1.15, "lower": 0.9, "agg": "mean"}
# what stands in the section `actor`
CASES: dict[str, dict[str, Any]] = {
    "clip": {"eps_clip": 0.1, "recompute_logprob": True},
    "clip of two sides": {"eps_clip": 0.1, "eps_clip_higher": 0.28, "recompute_logprob": True},
    "dual clip": {"eps_clip": 0.2, "c_clip": 1.3, "recompute_logprob": True},
    "ratio to what sampled": {"eps_clip": 0.1, "recompute_logprob": False},
    "sequence": {"eps_clip": 0.25, "importance_sampling_level": "sequence", "recompute_logprob": True},
    "sapo": {"use_sapo_loss": True, "sapo_tau_pos": 1.5, "sapo_tau_neg": 2.0, "recompute_logprob": True},
    "decoupled": {"eps_clip": 0.2, "use_decoupled_loss": True},
    "decoupled mask": {
        "eps_clip": 0.2,
        "use_decoupled_loss": True,
        REJECTS: {**BOUNDS, "level": "token", "action": "mask", "metric": "ratio"},
    },
    "decoupled clamp": {
        "eps_clip": 0.2,
        "use_decoupled_loss": True,
        REJECTS: {**BOUNDS, "level": "token", "action": "clamp", "metric": "ratio"},
    },
    "decoupled k2": {
        "eps_clip": 0.2,
        "use_decoupled_loss": True,
        REJECTS: {"upper": 0.02, "lower": None, "level": "token", "action": "mask", "metric": "kl_k2"},
    },
    "decoupled k1 of sequences": {
        "eps_clip": 0.2,
        "use_decoupled_loss": True,
        REJECTS: {
            "upper": 0.03,
            "lower": -0.1,
            "level": "sequence",
            "agg": "mean",
            "action": "mask",
            "metric": "kl_k1",
        },
    },
}


def rows() -> dict[str, torch.Tensor]:
    """Return the columns, ``[rows, tokens]`` padded on the right; each row has one advantage."""
    draws = torch.Generator().manual_seed(13)
    mask = torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, TOKENS, generator=draws) * scale

    logprobs = -1.5 + normal(0.5)
    old = logprobs - torch.tensor([0.2, -0.25, 0.15, -0.3])[:, None] - normal(0.2)
    return {
        "logprobs": logprobs * mask,
        "old_logprobs": old * mask,
        "rollout_logprobs": (old + normal(0.15)) * mask,
        "mask": mask.float(),
        "advantages": torch.tensor([0.9, -0.7, 0.3, -1.1])[:, None] * mask,
    }


def functions() -> SimpleNamespace:
    root = folder_of(REPOSITORY)
    estimator = definitions(root / "areal/utils/data.py", ["KLEstimator"], {"torch": torch})
    given = {"torch": torch, "dataclass": dataclass, **estimator}
    file = root / "areal/utils/functional/functional.py"
    return SimpleNamespace(**definitions(file, FUNCTIONS, given))


def case(areal: SimpleNamespace, actor: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, and AReaL's loss and gradient."""
    given = rows()
    logprobs = given["logprobs"].clone().requires_grad_()
    mask = given["mask"].bool()
    if actor.get("use_sapo_loss"):
        taus = {"tau_pos": actor["sapo_tau_pos"], "tau_neg": actor["sapo_tau_neg"]}
        loss, _ = areal.sapo_loss_fn(
            logprobs, given["old_logprobs"], given["advantages"], loss_mask=mask, **taus
        )
    else:
        is_decoupled = actor.get("use_decoupled_loss", False)
        recomputed = is_decoupled or actor["recompute_logprob"]
        proximal = given["old_logprobs" if recomputed else "rollout_logprobs"]
        loss, _ = areal.ppo_actor_loss_fn(
            logprobs=logprobs,
            proximal_logprobs=proximal,
            old_logprobs=given["rollout_logprobs"] if is_decoupled else proximal,
            advantages=given["advantages"],
            eps_clip=actor["eps_clip"],
            loss_mask=mask,
            eps_clip_higher=actor.get("eps_clip_higher"),
            c_clip=actor.get("c_clip"),
            rejection_sampling=SimpleNamespace(**actor[REJECTS]) if REJECTS in actor else None,
            importance_sampling_level=actor.get("importance_sampling_level", "token"),
        )
    loss.backward()
    return {"actor": actor, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    areal = functions()
    cases = {name: case(areal, actor) for name, actor in CASES.items()}
    return {"rows": {name: column.tolist() for name, column in rows().items()}, "cases": cases}
