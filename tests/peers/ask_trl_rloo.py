"""TRL's RLOOTrainer: its loss on fixed rows, value and gradients, and the advantages that it gives.

``RLOOTrainer._compute_loss`` runs on a trainer that no model was loaded for, as in ask_trl_grpo.py;
``_generate_and_score_completions`` runs on a real one with a tiny model, as in ask_trl_grpo_rows.py.
Log-probs come from here instead of a forward pass. Gradients are of the log-probs, one per token.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from ask_trl_grpo import LENGTHS
from ask_trl_grpo import ROWS as LOSS_ROWS
from ask_trl_grpo import TOKENS as LOSS_TOKENS
from ask_trl_grpo import rows as loss_rows
from ask_trl_grpo_rows import END, REWARDS, ROWS, SECOND, TOKENS, asked, model_in, of_rows
from trl import RLOOConfig, RLOOTrainer

PEERS = ["trl"]
LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "epsilon": {"epsilon": 0.1, "epsilon_high": 0.3},
    "wide": {"epsilon": 0.6, "epsilon_high": 1.5},
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "default": {"beta": 0.0},
    "normalize_advantages": {"beta": 0.0, "normalize_advantages": True},
    "reward_clip_range": {"beta": 0.0, "reward_clip_range": [0.2, 0.6]},
    "both of two": {
        "beta": 0.0,
        "reward_clip_range": [0.2, 0.9],
        "normalize_advantages": True,
        "reward_weights": [1.0, 0.5],
    },
    "beta": {"beta": 0.05},
    "all with beta": {"beta": 0.05, "reward_clip_range": [0.2, 0.6], "normalize_advantages": True},
}


def loss_of(settings: dict[str, Any], given: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    """Return TRL's loss and its gradient."""
    args = RLOOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    logprobs = given["logprobs"].clone().requires_grad_()
    trainer = object.__new__(RLOOTrainer)
    trainer.args, trainer.accelerator = args, Accelerator(cpu=True)
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    # as RLOOTrainer.__init__ has them
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.aux_loss_enabled = False
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, given["entropies"], None)
    nothing = torch.zeros(LOSS_ROWS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(LOSS_ROWS, LOSS_TOKENS, dtype=torch.long),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_logps": (given["old_logprobs"] * given["mask"]).sum(1),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return {"settings": settings, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def advantages_of(
    settings: dict[str, Any], logprobs: torch.Tensor, reference: torch.Tensor, folder: str, tokenizer: Any
) -> dict[str, Any]:
    """Return the advantages that the trainer makes of the rewards of 8 rows, four per prompt."""
    args = RLOOConfig(**of_rows(folder), **settings)
    trainer = RLOOTrainer(**asked(settings, folder, tokenizer), args=args)
    ids = [[5] * (TOKENS - 1) + [END]] * ROWS
    trainer._generate = lambda prompts: ([[3, 4]] * ROWS, ids, ["w5 w5"] * ROWS)
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        reference if model is trainer.ref_model else logprobs,
        None,
        None,
    )
    trainer._metrics["train"].clear()
    trainer.model.train()
    out = trainer._generate_and_score_completions([{"prompt": "w3 w4"} for _ in range(ROWS)])
    return {"settings": settings, "advantages": out["advantages"].tolist()}


def numbers() -> dict[str, Any]:
    given = loss_rows()
    draws = torch.Generator().manual_seed(9)
    logprobs = -1.5 + 0.4 * torch.randn(ROWS, TOKENS, generator=draws)
    reference = logprobs + 0.3 * torch.randn(ROWS, TOKENS, generator=draws)
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: loss_of(settings, given, folder) for name, settings in LOSSES.items()}
        tokenizer = model_in(folder)
        advantages = {
            name: advantages_of(settings, logprobs, reference, folder, tokenizer)
            for name, settings in ADVANTAGES.items()
        }
    columns = ("logprobs", "old_logprobs", "mask", "advantages")
    return {
        "lengths": LENGTHS,
        "loss_rows": {name: given[name].tolist() for name in columns},
        "losses": losses,
        "rows": {
            "rewards": REWARDS,
            "second": SECOND,
            "logprobs": logprobs.tolist(),
            "ref_logprobs": reference.tolist(),
        },
        "advantages": advantages,
    }
