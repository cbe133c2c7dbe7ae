"""verl's own policy losses, corrections and advantages on fixed rows: values, and gradients of log-probs.

The registered functions of ``verl.trainer.ppo.core_algos`` run on log-probs that are drawn here, and so do
the weights and masks of its rollout correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl_loss import policy_loss

PEERS = ["verl"]
ROWS, TOKENS = 4, 6
LENGTHS = [6, 4, 5, 2]
AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
    "sapo": {},
    "geo_mean": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    "dro": {},
}
REJECTIONS = {
    "token_k1": "0.8_1.2",
    "token_k2": 0.02,
    "token_k3": 0.02,
    "seq_sum_k1": "0.7_1.3",
    "seq_sum_k2": 0.1,
    "seq_mean_k1": "0.9_1.05",
    "seq_mean_k3": 0.03,
    "seq_max_k2": 0.1,
    "seq_max_k3": 0.1,
}
WEIGHTS = [("token", 1.1), ("sequence", 1.3), ("token", "0.9_1.1"), ("sequence", "0.5_1.3")]
# of three prompts' samples: those of the second differ in nothing, and one other reward is 0
REWARDS, GROUPS = [1.0, 0.0, -0.5, 0.5, 0.5, 0.5, 2.0, 1.0], ["a"] * 3 + ["b"] * 2 + ["c"] * 3


def rows() -> dict[str, torch.Tensor]:
    """Return the columns, ``[rows, tokens]`` padded on the right; each row has one advantage."""
    draws = torch.Generator().manual_seed(11)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, TOKENS, generator=draws) * scale

    mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).float()
    logprobs = -1.5 + normal(0.5)
    old = logprobs - torch.tensor([0.2, -0.25, 0.15, -0.3])[:, None] - normal(0.2)
    return {
        "logprobs": logprobs * mask,
        "old_logprobs": old * mask,
        "rollout_logprobs": (old + normal(0.2)) * mask,
        "mask": mask,
        "advantages": torch.tensor([0.9, -0.7, 0.3, -1.1])[:, None] * mask,
    }


def loss_of(name: str, aggregate: str, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return verl's loss and the gradient of its log-probs."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size_per_gpu=ROWS,
        policy_loss=PolicyLossConfig(loss_mode=name, **({"dro_beta": 0.3} if name == "dro" else {})),
        **LOSSES[name],
    )
    loss, logprobs = policy_loss(name, given, "old_logprobs", aggregate, config)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    given = rows()
    log_ratio = (given["old_logprobs"] - given["rollout_logprobs"]) * given["mask"]
    rewards = torch.zeros(len(REWARDS), 3)
    rewards[:, -1] = torch.tensor(REWARDS)
    gpg, _ = core_algos.compute_gpg_outcome_advantage(
        rewards, torch.ones(len(REWARDS), 3), np.array(GROUPS), f_norm=2.0
    )
    return {
        "rows": {name: column.tolist() for name, column in given.items()},
        "losses": {name: {how: loss_of(name, how, given) for how in AGGREGATES} for name in LOSSES},
        "rejections": {
            name: {
                "threshold": bound,
                "mask": compute_rollout_rejection_mask(log_ratio, given["mask"], name, bound)[0].tolist(),
            }
            for name, bound in REJECTIONS.items()
        },
        "weights": [
            {
                "level": level,
                "threshold": bound,
                "weights": compute_rollout_correction_weights(log_ratio, given["mask"], level, bound)[
                    0
                ].tolist(),
            }
            for level, bound in WEIGHTS
        ],
        "gpg": {"rewards": REWARDS, "groups": GROUPS, "f_norm": 2.0, "advantages": gpg[:, 0].tolist()},
    }
