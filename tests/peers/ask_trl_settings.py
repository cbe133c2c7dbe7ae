"""The settings of TRL's trainers with their defaults, and the arguments of the trainers."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.simplefilter("ignore")

import trl  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402
from trl.trainer.distillation_config import DistillationConfig  # noqa: E402
from trl.trainer.distillation_trainer import DistillationTrainer  # noqa: E402

PEERS = ["trl"]
CONFIGS: dict[str, tuple[type, type]] = {
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
    "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "sft": (trl.SFTConfig, trl.SFTTrainer),
    "kto": (trl.KTOConfig, trl.KTOTrainer),
    "reward": (trl.RewardConfig, trl.RewardTrainer),
    "distillation": (DistillationConfig, DistillationTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
}


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    return value.value if hasattr(value, "value") else value


def numbers() -> dict[str, Any]:
    return {
        "defaults": {
            kind: {field.name: default_of(field) for field in dataclasses.fields(config)}
            for kind, (config, _) in CONFIGS.items()
        },
        "arguments": {
            kind: [*inspect.signature(trainer.__init__).parameters][1:]
            for kind, (_, trainer) in CONFIGS.items()
        },
        "model": {field.name: default_of(field) for field in dataclasses.fields(trl.ModelConfig)},
    }
