"""verl's own policy losses, KL terms and bypass mode under settings as a user types them: gradients."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl_loss import policy_loss

PEERS = ["verl"]
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ROWS, TOKENS = 4, 6
LENGTHS = [6, 4, 5, 2]
CLIPS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25}
MODES: dict[str, dict[str, Any]] = {
    "vanilla": {**CLIPS, "clip_ratio_c": 1.4},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "geo_mean": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    "cispo": CLIPS,
    "sapo": {"tau_pos": 1.5, "tau_neg": 2.0},
    "gpg": {},
    "dppo_tv": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
    "dro": {"dro_beta": 0.3},
}
MEANS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FIXED = ("geo_mean", "sapo")  # whose mean no key sets
KLS = (
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
)
LONGEST = 8  # data.max_response_length
COEF = 0.2


def rows() -> dict[str, torch.Tensor]:
    """Return the columns, ``[rows, tokens]`` padded on the right; each row has one advantage."""
    draws = torch.Generator().manual_seed(5)
    mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).float()
    logprobs = -1.5 + torch.randn(ROWS, TOKENS, generator=draws) * 0.5
    old = (
        logprobs
        - torch.tensor([0.2, -0.25, 0.15, -0.3])[:, None]
        - torch.randn(ROWS, TOKENS, generator=draws) * 0.2
    )
    return {
        "logprobs": logprobs * mask,
        "old_logprobs": old * mask,
        "rollout_logprobs": (old + torch.randn(ROWS, TOKENS, generator=draws) * 0.2) * mask,
        "ref_logprobs": (old + torch.randn(ROWS, TOKENS, generator=draws) * 0.4) * mask,
        "mask": mask,
        "advantages": torch.tensor([0.9, -0.7, 0.3, -1.1])[:, None] * mask,
    }


def config_of(mode: str, settings: dict[str, Any]) -> ActorConfig:
    of_loss = {name: value for name, value in settings.items() if name == "dro_beta"}
    of_actor = {name: value for name, value in settings.items() if name != "dro_beta"}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size_per_gpu=ROWS,
        policy_loss=PolicyLossConfig(loss_mode=mode, **of_loss),
        **of_actor,
    )
    config.global_batch_info["loss_scale_factor"] = LONGEST
    return config


def case(mode: str, mean: str, settings: dict[str, Any], kl: str | None = None) -> dict[str, Any]:
    """Return what is typed, and verl's loss and gradient."""
    given = rows()
    config = config_of(mode, settings)
    loss, logprobs = policy_loss(mode, given, "old_logprobs", mean, config)
    typed = [f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={mean}"]
    typed += [
        f"{ACTOR}.{'policy_loss.' if name == 'dro_beta' else ''}{name}={value}"
        for name, value in settings.items()
    ]
    if kl:
        divergence = core_algos.kl_penalty(logprobs, given["ref_logprobs"], kl)
        term = core_algos.agg_loss(divergence, given["mask"], mean, **config.global_batch_info)
        loss = loss + COEF * term
        typed += [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef={COEF}", f"{ACTOR}.kl_loss_type={kl}"]
    loss.backward()
    return {"typed": typed, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def bypassed(correction: dict[str, Any]) -> dict[str, Any]:
    """Return the same of bypass mode, where the log-probs of what sampled take the place of the old ones."""
    given = rows()
    config = config_of("bypass_mode", {**CLIPS, "clip_ratio_c": 3.0})
    object.__setattr__(config.policy_loss, "rollout_correction", correction)
    loss, logprobs = policy_loss("bypass_mode", given, "rollout_logprobs", "token-mean", config)
    loss.backward()
    typed = [f"{CORRECTION}.bypass_mode=True", *(f"{ACTOR}.{name}={value}" for name, value in CLIPS.items())]
    typed += [f"{CORRECTION}.{name}={value}" for name, value in correction.items()]
    return {"typed": typed, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    cases = {
        f"{mode} {mean}": case(mode, mean, settings)
        for mode, settings in MODES.items()
        for mean in (MEANS if mode not in FIXED else ("seq-mean-token-mean",))
    }
    cases |= {f"kl {kl}": case("vanilla", "token-mean", MODES["vanilla"], kl) for kl in KLS}
    cases |= {
        "bypass": bypassed({"loss_type": "ppo_clip"}),
        "bypass, weights are not read": bypassed({"loss_type": "ppo_clip", "rollout_is": "token"}),
        "bypass reinforce": bypassed({"loss_type": "reinforce"}),
        "bypass reinforce token": bypassed(
            {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2}
        ),
    }
    return {"rows": {name: column.tolist() for name, column in rows().items()}, "cases": cases}
