"""verl's own configuration, as Hydra composes it: every default, and what a few command lines come to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

PEERS = ["verl", "hydra-core"]
CONFIGS = Path(verl.__file__).parent / "trainer" / "config"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]

# what is typed, without the name of the engine, which verl has no default of
CASES = {
    "no_evaluation_before": [*GRPO, "trainer.test_freq=5", "trainer.val_before_train=False"],
    "critic_follows": [
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=1024",
        f"{ACTOR}.ppo_mini_batch_size=512",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ],
    "critic_says": [
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=1024",
        f"{ACTOR}.ppo_mini_batch_size=512",
        "critic.ppo_mini_batch_size=128",
        "critic.ppo_epochs=3",
        "critic.loss_agg_mode=token-mean",
    ],
    "validation_samples": [
        *GRPO,
        "trainer.test_freq=10",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        f"{ROLLOUT}.val_kwargs.top_p=0.7",
        f"{ROLLOUT}.val_kwargs.n=30",
    ],
    "warm_up_by_share": [
        *GRPO,
        f"{ACTOR}.optim.lr_warmup_steps=0",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
    ],
    "warm_up_by_steps": [
        *GRPO,
        f"{ACTOR}.optim.lr_warmup_steps=10",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
    ],
    "overrides_of_config": [
        *GRPO,
        f"{ACTOR}.use_kl_loss=True",
        "+actor_rollout_ref.model.override_config.max_position_embeddings=32768",
        "actor_rollout_ref.model.trust_remote_code=True",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B",
    ],
    "veomni": [*GRPO, "model_engine=veomni", f"{ACTOR}.optim.lr=1e-6"],
}
# of the commands: keys that decide what the graph has
READ = (
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.optim.lr_scheduler_type",
    f"{ACTOR}.optim.lr_warmup_steps",
    f"{ACTOR}.optim.lr_warmup_steps_ratio",
    f"{ROLLOUT}.val_kwargs.temperature",
    f"{ROLLOUT}.val_kwargs.top_p",
    f"{ROLLOUT}.val_kwargs.top_k",
    f"{ROLLOUT}.val_kwargs.n",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.trust_remote_code",
    "critic.ppo_mini_batch_size",
    "critic.ppo_epochs",
    "critic.loss_agg_mode",
    "trainer.test_freq",
    "trainer.val_before_train",
)


def numbers() -> dict[str, Any]:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        defaults = composed("ppo_trainer", [])
        megatron = composed("ppo_trainer", ["model_engine=megatron"])
        sft = composed("sft_trainer_engine", [])
        cases = {name: composed("ppo_trainer", given) for name, given in CASES.items()}
    return {
        "defaults": defaults,
        "megatron": {key: value for key, value in megatron.items() if defaults.get(key, "none") != value},
        "sft": sft,
        "cases": {
            name: {"given": CASES[name], "composed": {key: case[key] for key in READ if key in case}}
            for name, case in cases.items()
        },
    }


def composed(name: str, given: list[str]) -> dict[str, Any]:
    """Return the values of a configuration by dotted keys, references filled in."""
    engine = [f"{ROLLOUT}.name=sglang"] if name == "ppo_trainer" else []
    config = OmegaConf.to_container(compose(name, overrides=[*engine, *given]), resolve=True)
    return dict(flattened(config))


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted keys; of an override of config.json the whole."""
    if isinstance(value, dict) and value and not path.endswith("override_config"):
        for name, child in value.items():
            yield from flattened(child, f"{path}.{name}" if path else str(name))
    else:
        yield path, value
