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
    # all tokens between the bounds, so that nothing is drawn; and 4 of the 17
    "clip_cov": {**CLIPS, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.02, "clip_cov_ub": 0.4},
    "kl_cov": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5},
}
OF_LOSS = ("dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
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
TEACHER = "distillation.teacher_models.teacher_model"
LIMITS = (None, 0.3)  # of the KL of a token, in nats


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
    of_loss = {name: value for name, value in settings.items() if name in OF_LOSS}
    of_actor = {name: value for name, value in settings.items() if name not in OF_LOSS}
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


def case(
    mode: str, mean: str, settings: dict[str, Any], kl: str | None = None, moved: bool = True
) -> dict[str, Any]:
    """Return what is typed, and verl's loss and gradient; ``moved`` is false of an iteration's first step."""
    given = rows()
    if not moved:
        given["old_logprobs"] = given["logprobs"]
    config = config_of(mode, settings)
    loss, logprobs = policy_loss(mode, given, "old_logprobs", mean, config)
    typed = [f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={mean}"]
    typed += [
        f"{ACTOR}.{'policy_loss.' if name in OF_LOSS else ''}{name}={value}"
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


def distilled(limit: float | None) -> dict[str, Any]:
    """Return the same of the reverse KL to a teacher as a reward, in an iteration's first step.

    0.9.1 gives its clipped loss, with bounds of its own, the estimate k1 of the KL, cut and with its sign
    changed, as advantages (verl/trainer/distillation/losses.py; that file imports more than this environment
    has). The teacher's log-probs are the column ref_logprobs.
    """
    given = rows()
    given["old_logprobs"] = given["logprobs"]
    divergence = core_algos.kl_penalty(given["logprobs"], given["ref_logprobs"], "k1")
    if limit is not None:
        divergence = divergence.clamp(min=-limit, max=limit)
    given["advantages"] = -divergence * given["mask"]
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    loss, logprobs = policy_loss("vanilla", given, "old_logprobs", "token-mean", config_of("vanilla", clips))
    loss.backward()
    options = {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False, **clips}
    options["loss_max_clamp"] = "null" if limit is None else limit
    typed = ["distillation.enabled=True", f"{TEACHER}.model_path=Qwen/Qwen3-32B"]
    typed += [f"distillation.distillation_loss.{name}={value}" for name, value in options.items()]
    return {"typed": typed, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    cases = {
        f"{mode} {mean}": case(mode, mean, settings)
        for mode, settings in MODES.items()
        for mean in (MEANS if mode not in FIXED else ("seq-mean-token-mean",))
    }
    cases |= {
        f"{mode} first step": case(mode, "token-mean", MODES[mode], moved=False)
        for mode in ("clip_cov", "kl_cov")
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
    columns = {name: column.tolist() for name, column in rows().items()}
    return {"rows": columns, "cases": cases, "distilled": {str(limit): distilled(limit) for limit in LIMITS}}
