"""NeMo-RL's own policy loss under settings as a user writes them: value and gradient, of a checkout."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any, NotRequired, Optional, Protocol, TypedDict

import torch
from ask_areal_losses import ROWS, rows
from checkout import definitions, folder_of
from pydantic import BaseModel

PEERS: list[str] = []
REPOSITORY, COMMIT = "NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"  # 2026-08-22
CHECKOUTS = {REPOSITORY: COMMIT}
NO_KL = {"reference_policy_kl_penalty": 0.0}
CORRECTED = {**NO_KL, "use_importance_sampling_correction": True}
TYPE, BOUND = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
# what stands in the section `loss_fn`
CASES: dict[str, dict[str, Any]] = {
    "token": {**NO_KL, "ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
    "dual clip": {**NO_KL, "ratio_clip_c": 1.3},
    "sequence mean": {**NO_KL, "token_level_loss": False},
    "gspo": {
        **NO_KL,
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 0.25,
        "ratio_clip_max": 0.3,
    },
    "cispo": {**NO_KL, "use_cispo": True, "ratio_clip_min": 0.1, "ratio_clip_max": 0.2},
    "reinforce": {**NO_KL, "disable_ppo_ratio": True},
    "corrected": CORRECTED,
    "tis": {**CORRECTED, TYPE: "tis", BOUND: 1.1},
    "tis of two sides": {**CORRECTED, TYPE: "tis", BOUND: 1.1, f"{BOUND}_min": 0.95},
    "icepop": {**CORRECTED, TYPE: "icepop", BOUND: 1.15, f"{BOUND}_min": 0.9},
    "seq-mask-tis": {**CORRECTED, TYPE: "seq-mask-tis", BOUND: 1.05, f"{BOUND}_min": 0.95},
    "gspo corrected": {
        **CORRECTED,
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 0.25,
        "ratio_clip_max": 0.3,
        TYPE: "tis",
        BOUND: 1.1,
    },
}
KLS = ("k1", "k2", "k3")


def loss_class() -> SimpleNamespace:
    root = folder_of(REPOSITORY) / "nemo_rl/algorithms"
    kinds = ("LossType", "MetricNormalizer", "LossInputType", "LossFunction")
    typing = {"Any": Any, "Protocol": Protocol, "Optional": Optional, "TypedDict": TypedDict}
    given = {"torch": torch, "enum": enum, "NotRequired": NotRequired, "BaseModel": BaseModel, **typing}
    given |= definitions(root / "loss/interfaces.py", kinds, given)
    given |= definitions(root / "utils.py", ("calculate_kl", "masked_mean"), given)
    names = ("ClippedPGLossConfig", "ClippedPGLossFn")
    return SimpleNamespace(**definitions(root / "loss/loss_functions.py", names, given))


def case(nemo: SimpleNamespace, loss_fn: dict[str, Any], moved: bool = True) -> dict[str, Any]:
    """Return the settings, and NeMo-RL's loss and gradient; not ``moved`` is an iteration's first step."""
    given = rows()
    if not moved:
        given["old_logprobs"] = given["logprobs"]
    logprobs = given["logprobs"].clone().requires_grad_()

    def shifted(column: torch.Tensor) -> torch.Tensor:  # behind a prompt of one token
        return torch.cat([torch.zeros(ROWS, 1), column], 1)

    data = {
        "token_mask": shifted(given["mask"]),
        "sample_mask": torch.ones(ROWS),
        "advantages": shifted(given["advantages"]),
        "prev_logprobs": shifted(given["old_logprobs"]),
        "generation_logprobs": shifted(given["rollout_logprobs"]),
        "reference_policy_logprobs": shifted(given["rollout_logprobs"] - 0.3 * given["mask"]),
    }
    config = nemo.ClippedPGLossConfig.model_construct(**loss_fn)
    loss, _ = nemo.ClippedPGLossFn(config)(logprobs, data, torch.tensor(float(ROWS)), given["mask"].sum())
    loss.backward()
    return {"loss_fn": loss_fn, "moved": moved, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    nemo = loss_class()
    cases = {name: case(nemo, loss_fn) for name, loss_fn in CASES.items()}
    for kind in KLS:
        kl = {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": kind}
        cases[f"kl {kind}"] = case(nemo, kl, moved=False)
    return {"rows": {name: column.tolist() for name, column in rows().items()}, "cases": cases}
