"""The loss of TRL's GRPOTrainer on fixed rows, for each setting that decides it: value and gradients.

``GRPOTrainer._compute_loss`` itself runs, on a trainer that no model was loaded for: log-probs and entropies
come from here instead of a forward pass. Gradients are of the log-probs (and entropies), one per token.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

warnings.simplefilter("ignore")
PEERS = ["trl"]
ROWS, TOKENS = 4, 6
LENGTHS = [6, 4, 5, 2]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "sapo": {"loss_type": "sapo"},
    "sapo temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    "cispo": {"loss_type": "cispo"},
    "cispo epsilon_high 0.9": {"loss_type": "cispo", "epsilon_high": 0.9},
    "cispo epsilon_high 1": {"loss_type": "cispo", "epsilon_high": 1.0},
    "cispo epsilon_high 5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo": {"loss_type": "vespo"},
    "vespo powers": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.5,
        "vespo_k_neg": 1.0,
        "vespo_lambda_neg": 0.5,
    },
    "luspo": {"loss_type": "luspo"},
    "luspo sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "luspo sequence delta": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "delta": 1.1,
    },
    "luspo sequence beta": {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.04},
    "epsilon": {"epsilon": 0.1, "epsilon_high": 0.28},
    "delta 1.5": {"delta": 1.5},
    "delta 1.1": {"delta": 1.1},
    "delta 0.7": {"delta": 0.7},
    "grpo delta 1.1": {"loss_type": "grpo", "delta": 1.1},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence grpo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sequence bnpo": {"importance_sampling_level": "sequence", "loss_type": "bnpo"},
    "sequence dr_grpo": {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
    "sequence sapo": {"importance_sampling_level": "sequence", "loss_type": "sapo"},
    "sequence cispo": {"importance_sampling_level": "sequence", "loss_type": "cispo"},
    "sequence cispo 5": {
        "importance_sampling_level": "sequence",
        "loss_type": "cispo",
        "epsilon_high": 5.0,
    },
    "sequence vespo": {"importance_sampling_level": "sequence", "loss_type": "vespo"},
    "sequence delta 1.1": {"importance_sampling_level": "sequence", "delta": 1.1},
    "sequence grpo delta 1.5": {"importance_sampling_level": "sequence", "loss_type": "grpo", "delta": 1.5},
    "beta": {"beta": 0.04},
    "beta plain": {"beta": 0.04, "use_bias_correction_kl": False},
    "grpo beta": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo beta": {"loss_type": "dr_grpo", "beta": 0.04},
    "sapo beta": {"loss_type": "sapo", "beta": 0.04},
    "cispo beta": {"loss_type": "cispo", "beta": 0.04},
    "vespo beta": {"loss_type": "vespo", "beta": 0.04},
    "sequence beta": {"importance_sampling_level": "sequence", "beta": 0.04},
    "sequence grpo beta": {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.04},
    "sequence beta plain": {
        "importance_sampling_level": "sequence",
        "beta": 0.04,
        "use_bias_correction_kl": False,
    },
    "top entropy": {"top_entropy_quantile": 0.4},
    "grpo top entropy": {"loss_type": "grpo", "top_entropy_quantile": 0.2},
    "top entropy beta": {"top_entropy_quantile": 0.4, "beta": 0.04},
    "entropy": {"entropy_coef": 0.01},
    "grpo entropy": {"loss_type": "grpo", "entropy_coef": 0.01},
    "dr_grpo entropy": {"loss_type": "dr_grpo", "entropy_coef": 0.01},
    "entropy of the top": {"entropy_coef": 0.01, "top_entropy_quantile": 0.4},
    "off policy mask": {"off_policy_mask_threshold": 0.05},
    "off policy mask grpo beta": {"off_policy_mask_threshold": 0.05, "loss_type": "grpo", "beta": 0.04},
    "vllm": {"use_vllm": True},
    "vllm beta": {"use_vllm": True, "beta": 0.04},
    "vllm grpo": {"use_vllm": True, "loss_type": "grpo"},
    "vllm cispo": {"use_vllm": True, "loss_type": "cispo"},
    "vllm vespo": {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "vllm off policy mask": {"use_vllm": True, "off_policy_mask_threshold": 0.05},
    "vllm without correction": {"use_vllm": True, "vllm_importance_sampling_correction": False},
}


def rows() -> dict[str, torch.Tensor]:
    """Return the columns, ``[rows, tokens]`` padded on the right, and one advantage per row."""
    draws = torch.Generator().manual_seed(7)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, TOKENS, generator=draws) * scale

    mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).long()
    logprobs = -1.5 + normal(0.5)
    shift = torch.tensor([0.3, -0.35, 0.25, -0.4])[:, None]
    old = logprobs - shift * torch.rand(ROWS, TOKENS, generator=draws) - normal(0.2)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": logprobs + normal(0.6),
        "sampling_logprobs": old + normal(0.1),
        "entropies": torch.rand(ROWS, TOKENS, generator=draws) * 2,
        "weights": torch.rand(ROWS, TOKENS, generator=draws) + 0.5,
        "mask": mask,
        "advantages": torch.tensor([0.9, -0.7, 0.3, -1.1]),
    }


def loss_of(settings: dict[str, Any], given: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    """Return TRL's loss and its gradients, of log-probs and of entropies."""
    args = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", max_completion_length=8, **settings
    )
    args.steps_per_generation = 1
    logprobs = given["logprobs"].clone().requires_grad_()
    entropies = given["entropies"].clone().requires_grad_()
    trainer = object.__new__(GRPOTrainer)
    trainer.args, trainer.accelerator = args, Accelerator(cpu=True)
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    # as GRPOTrainer.__init__ has them
    for name in (
        "beta",
        "loss_type",
        "importance_sampling_level",
        "off_policy_mask_threshold",
        "top_entropy_quantile",
        "entropy_coef",
        "use_adaptive_entropy",
        "use_vllm",
        "vllm_importance_sampling_correction",
        "max_completion_length",
    ):
        setattr(trainer, name, getattr(args, name))
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer._entropy_bonus_enabled = args.entropy_coef != 0.0
    trainer.aux_loss_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    nothing = torch.zeros(ROWS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "num_items_in_batch": given["mask"].sum(),
        "old_per_token_logps": given["old_logprobs"],
        "ref_per_token_logps": given["ref_logprobs"],
    }
    if args.use_vllm:
        inputs["importance_sampling_ratio"] = given["weights"]
        inputs["sampling_per_token_logps"] = given["sampling_logprobs"]
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    of_entropies = {} if entropies.grad is None else {"entropies_gradient": entropies.grad.tolist()}
    return {"settings": settings, "loss": loss.item(), "gradient": logprobs.grad.tolist(), **of_entropies}


def numbers() -> dict[str, Any]:
    given = rows()
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: loss_of(settings, given, folder) for name, settings in SETTINGS.items()}
    return {
        "max_completion_length": 8,
        "rows": {name: column.tolist() for name, column in given.items()},
        "cases": cases,
    }
