"""What TRL's GRPOTrainer makes of generated rows: advantages, weights of the sampler's rows, what is learnt.

A real trainer with a tiny model runs ``_generate_and_score_completions``; the responses, their log-probs and
their rewards come from here instead of a model, so that each setting is seen on the same rows. Eight rows,
four per prompt, of 5 tokens; the last of some is the end token, others are truncated.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

warnings.simplefilter("ignore")
PEERS = ["trl"]
ROWS, TOKENS, END = 8, 5, 1
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 1.0, 0.0]
SECOND = [0.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.25, 1.0]
TRUNCATED = [False, True, False, False, True, False, False, True]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "false": {"scale_rewards": False},
    "two": {"reward_weights": [1.0, 0.5]},
    "two batch": {"reward_weights": [1.0, 0.5], "scale_rewards": "batch"},
    "normalize_then_sum": {
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "mask truncated": {"mask_truncated_completions": True},
    "vllm": {"use_vllm": True},
    "vllm floor": {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.8},
    "vllm sequence_truncate": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "vllm sequence_truncate floor": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.8,
    },
    "vllm token_truncate": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
    },
    "vllm token_truncate floor": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
        "vllm_importance_sampling_clip_min": 0.95,
    },
    "vllm token_mask": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": 1.1,
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "vllm sequence_mask": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 1.1,
        "vllm_importance_sampling_clip_min": 0.8,
    },
    "vllm floor of no cap": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": None,
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "vllm mask truncated": {"use_vllm": True, "mask_truncated_completions": True},
}


def model_in(folder: str) -> PreTrainedTokenizerFast:
    words = WordLevel({"<pad>": 0, "<eos>": END} | {f"w{i}": i for i in range(2, 32)}, unk_token="<pad>")
    text = Tokenizer(words)
    text.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=32, eos_token_id=END, pad_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def first(completions: list[Any], **_: Any) -> list[float]:
    return REWARDS


def second(completions: list[Any], **_: Any) -> list[float]:
    return SECOND


def of_rows(folder: str) -> dict[str, Any]:
    """Return the settings under which one batch is all rows, four per prompt, on a CPU."""
    return {
        "output_dir": f"{folder}/out",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_generations": 4,
        "per_device_train_batch_size": ROWS,
        "max_completion_length": TOKENS,
        "gradient_checkpointing": False,
    }


def asked(settings: dict[str, Any], folder: str, tokenizer: Any) -> dict[str, Any]:
    """Return the model, the rewards and the data of a trainer, by the names of its parameters."""
    return {
        "model": folder,
        "reward_funcs": [first, second] if "reward_weights" in settings else [first],
        "train_dataset": Dataset.from_list([{"prompt": "w3 w4"}] * ROWS),
        "processing_class": tokenizer,
    }


def scored(
    settings: dict[str, Any], logprobs: torch.Tensor, sampled: torch.Tensor, folder: str, tokenizer: Any
) -> dict[str, Any]:
    """Return what the trainer makes of the rows under some settings."""
    vllm = settings.get("use_vllm", False)
    own = {key: value for key, value in settings.items() if key != "use_vllm"}
    args = GRPOConfig(**of_rows(folder), **own)
    trainer = GRPOTrainer(**asked(settings, folder, tokenizer), args=args)
    trainer.use_vllm = vllm  # set here, as its constructor starts vLLM
    ids = [[5] * (TOKENS - 1) + [6 if cut else END] for cut in TRUNCATED]
    lengths = [[3, 4]] * ROWS
    trainer._generate = lambda prompts: (
        lengths,
        ids,
        None,
        ["w5 w5"] * ROWS,
        sampled.tolist() if vllm else None,
        {},
        None,
        None,
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, None, None)
    trainer._metrics["train"].clear()
    trainer.model.train()
    out = trainer._generate_and_score_completions([{"prompt": "w3 w4"} for _ in range(ROWS)])
    kept = {"advantages": out["advantages"], "completion_mask": out["completion_mask"]}
    if "importance_sampling_ratio" in out:
        kept["weights"] = out["importance_sampling_ratio"]
    return {"settings": settings, **{name: value.tolist() for name, value in kept.items()}}


def numbers() -> dict[str, Any]:
    draws = torch.Generator().manual_seed(3)
    logprobs = -1.5 + 0.4 * torch.randn(ROWS, TOKENS, generator=draws)
    sampled = logprobs + 0.15 * torch.randn(ROWS, TOKENS, generator=draws)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = model_in(folder)
        cases = {
            name: scored(settings, logprobs, sampled, folder, tokenizer)
            for name, settings in SETTINGS.items()
        }
    columns = {"rewards": REWARDS, "second": SECOND, "truncated": TRUNCATED}
    return {
        "rows": {**columns, "logprobs": logprobs.tolist(), "sampling_logprobs": sampled.tolist()},
        "cases": cases,
    }
