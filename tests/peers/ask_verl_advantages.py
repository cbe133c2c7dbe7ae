"""verl's own estimators that compare the samples of a prompt, on fixed rewards and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos

PEERS = ["verl"]
LENGTHS = [5, 3, 4, 2, 6, 1, 3, 4]
GROUPS = ["a"] * 3 + ["b"] * 3 + ["c"] * 2
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.25, 0.25, -1.0, 2.0]
FORMS = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
WEIGHTS = [1.0, 0.5]
TOKENS = max(LENGTHS)
# what is typed -> more arguments of the estimator
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "grpo": ([], {"norm_adv_by_std_in_grpo": True}),
    "grpo without scale": (["algorithm.norm_adv_by_std_in_grpo=False"], {"norm_adv_by_std_in_grpo": False}),
    "rloo": ([], {}),
    "reinforce_plus_plus_baseline": ([], {}),
    "opo": ([], {}),
    "gpg": ([], {}),
    "grpo_passk": ([], {"config": {"norm_adv_by_std_in_grpo": True}}),
    "gdpo": (
        ["algorithm.gdpo_reward_keys=[accuracy,form]", f"algorithm.gdpo_reward_weights={WEIGHTS}"],
        {"config": {"gdpo_reward_keys": ["accuracy", "form"], "gdpo_reward_weights": WEIGHTS}},
    ),
}
# those that are something where a prompt has one sample
ALONE = (
    "grpo",
    "grpo without scale",
    "grpo_vectorized",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
)


def numbers() -> dict[str, Any]:
    mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).float()
    last = torch.tensor(LENGTHS) - 1
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(LENGTHS)), last] = torch.tensor(REWARDS)
    prompts = torch.ones(len(LENGTHS), 2)
    batch = {"prompts": prompts, "attention_mask": torch.cat([prompts, mask], 1).long()}
    columns = {"accuracy": np.array(REWARDS), "form": np.array(FORMS)}
    cases = {}
    for name, (typed, more) in CASES.items():
        estimator = name.split()[0]
        by_key = {"non_tensor_batch": columns, "batch": batch} if estimator == "gdpo" else {}
        advantages, _ = core_algos.get_adv_estimator_fn(estimator)(
            token_level_rewards=rewards.clone(), response_mask=mask, index=np.array(GROUPS), **more, **by_key
        )
        cases[name] = {
            "typed": [f"algorithm.adv_estimator={estimator}", *typed],
            "advantages": advantages.tolist(),
        }
    alone = {}
    for name in ALONE:
        typed, more = CASES.get(name, ([], {}))
        estimator = name.split()[0]
        advantages, _ = core_algos.get_adv_estimator_fn(estimator)(
            token_level_rewards=rewards.clone(),
            response_mask=mask,
            index=np.array([f"prompt {row}" for row in range(len(LENGTHS))]),
            **more,
        )
        typed = [f"algorithm.adv_estimator={estimator}", *typed]
        alone[name] = {"typed": typed, "advantages": advantages.tolist()}
    rows = {"lengths": LENGTHS, "groups": GROUPS, "rewards": REWARDS, "forms": FORMS}
    return {"rows": rows, "cases": cases, "alone": alone}
