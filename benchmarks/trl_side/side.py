"""TRL's half of ``trl_grpo.py``: a GRPOTrainer on the same model, data, loss and sampling, timed.

Runs in an environment of its own, which has TRL and no rlgraph. The last line of its output is JSON: of each
iteration ``seconds``, ``rewards`` (the mean) and ``lengths`` (mean tokens of an answer).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, SAMPLES = 32, 8


class Clock(TrainerCallback):
    """When training began and each iteration ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


class Scores:
    """The reward of each answer, and its mean and the answers' mean length over an iteration."""

    __name__ = "score"

    def __init__(self, kind: str) -> None:
        self.score = {"exact": exact, "closeness": closeness}[kind]
        self.means: list[float] = []
        self.lengths: list[float] = []

    def __call__(
        self, completions: list[str], answer: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        scores = [self.score(made, right) for made, right in zip(completions, answer, strict=True)]
        self.means.append(sum(scores) / len(scores))
        self.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return scores


def exact(made: str, right: str) -> float:
    """1 for the right answer, else 0, as ``reward.exact``."""
    return float(made.strip() == right.strip())


def closeness(made: str, right: str) -> float:
    """As ``reward_ops.py``."""
    return 1 - abs(len(made) - len(right)) / max(len(made), len(right), 1)


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    scores, clock = Scores(options.reward), Clock()
    GRPOTrainer(
        model=options.model,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        reward_funcs=[scores],
        args=config(options),
        train_dataset=load_dataset("parquet", data_files=options.data, split="train").rename_column(
            "question", "prompt"
        ),
        callbacks=[clock],
    ).train()
    seconds = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    print(json.dumps({"seconds": seconds, "rewards": scores.means, "lengths": scores.lengths}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--reward", choices=["exact", "closeness"], required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="eager")
    parser.add_argument(
        "--micro-batch", type=int, default=PROMPTS * SAMPLES, help="samples of one forward pass"
    )
    return parser.parse_args()


def config(options: argparse.Namespace) -> GRPOConfig:
    """GRPO with one optimizer step per iteration, nothing logged or saved, in float32 on the CPU.

    What TRL keeps on by default and makes it slower (recomputed activations, bf16, logging) is off.
    """
    transformers.logging.set_verbosity_error()
    return GRPOConfig(
        output_dir=options.out,
        model_init_kwargs={"attn_implementation": options.attention, "dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=options.seed,
        max_steps=options.iterations,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // options.micro_batch,
        num_generations=SAMPLES,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
