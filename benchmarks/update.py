"""How fast is an update beside transformers' own Trainer, on the same rows?

    OMP_NUM_THREADS=1 python benchmarks/update.py [--steps 16] [--threads 1]

Both fine-tune the same model, a Qwen2 of 4 M random weights in float32, in one process, on the same rows in
the same optimizer steps: fused AdamW, gradients clipped, cross-entropy as a mean over a step's answer tokens.
The process keeps freed memory, as a worker of a run does on a CPU; that serves both. They take turns step by
step. A step's ratio is that of its two times, in seconds of the CPU, so that what else the machine does slows
both; of the ratios of all steps but the first the median is printed. Afterwards the distance of the two sets
of weights is printed beside how far they moved. ``ragged`` rows have exponential lengths, ``equal`` rows one.
Trainer pads a micro-batch to its longest row, as its users do; it runs with micro-batches of several sizes,
and the one with the lowest ratio counts. The train engine has its defaults.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
import time
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory.allocator import keep_freed_memory

ROWS, PROMPT = 32, 16  # of an optimizer step; of each row
SETTINGS = {"ragged": 1.5, "equal": 1.0}  # and the least ratio that is wanted
TRIED = (4, 8, 16, 32)  # rows of the peer's micro-batches
SAME = 1e-3  # of what weights moved, they may be apart: AdamW divides by the size of small gradients
IGNORED = -100  # transformers' label of a token without a loss
OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "max_grad_norm": 1.0}
CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def rows_of(name: str, steps: int) -> list[list[int]]:
    """Return the rows of all steps: answers of 8 to 400 tokens, exponential with a mean of 100, or of 112."""
    draw = torch.Generator().manual_seed(0)
    count = ROWS * steps
    drawn = torch.empty(count).exponential_(1 / 100, generator=draw).clamp(8, 400).long()
    answers = drawn if name == "ragged" else torch.full((count,), 112)
    ids = torch.randint(3, CONFIG["vocab_size"], (int(answers.max()) + PROMPT, count), generator=draw)
    return [ids[: PROMPT + length, row].tolist() for row, length in enumerate(answers.tolist())]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a micro-batch as Trainer's users make it, ``[rows, longest]``, padded on the right."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(t, True) for t in (tokens, [*map(torch.ones_like, tokens)]))
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :PROMPT] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def columns_of(rows: list[list[int]]) -> dict[str, Ragged]:
    mask = [[False] * PROMPT + [True] * (len(row) - PROMPT) for row in rows]
    return {"tokens": Ragged.of(rows), "loss_mask": Ragged.of(mask, dtype=torch.bool)}


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """The cross-entropy of the tokens in the mask; others have a log-prob of 0."""
    return -batch["logprobs"].values.sum() / totals.tokens, {}


class Turns(TrainerCallback):  # type: ignore[misc]
    """Times each step of Trainer, and after it the same step of the engine."""

    def __init__(self, rows: list[list[int]], engine: FsdpEngine) -> None:
        self.steps = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        self.engine, self.peer, self.own = engine, list[float](), list[float]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        self.peer.append(now - self.start)
        columns = columns_of(self.steps[len(self.own)])
        self.engine.update(columns, objective, torch.arange(ROWS), ROWS)
        self.start = time.process_time()
        self.own.append(self.start - now)


def trained(model: str, rows: list[list[int]], micro: int, engine: FsdpEngine) -> tuple[Turns, Any]:
    """Return the times of a run, and Trainer's model after it."""
    arguments = TrainingArguments(
        output_dir=f"{model}/out",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=ROWS // micro,
        max_steps=len(rows) // ROWS,
        optim="adamw_torch_fused",
        learning_rate=OPTIMIZER["lr"],
        weight_decay=OPTIMIZER["weight_decay"],
        lr_scheduler_type="constant",
        max_grad_norm=OPTIMIZER["max_grad_norm"],
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    turns, peer = Turns(rows, engine), Qwen2ForCausalLM.from_pretrained(model)
    data: Any = [{"input_ids": row} for row in rows]
    trainer = Trainer(peer, arguments, padded, data, callbacks=[turns])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return turns, peer


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the L2 norm of the difference of all weights."""
    squares = [(weights[name].double() - others[name].double()).square().sum() for name in weights]
    return math.sqrt(sum(map(float, squares)))


def compare(name: str, model: str, steps: int, micro: int) -> float:
    """Print one setting with one micro-batch size of Trainer, and return its ratio."""
    rows, engine = rows_of(name, steps), FsdpEngine.of(model, optimizer=OPTIMIZER)
    start = dict(Qwen2ForCausalLM.from_pretrained(model).state_dict())
    turns, peer = trained(model, rows, micro, engine)
    own = dict(engine.weights())
    apart, moved = (distance(peer.state_dict(), other) for other in (own, start))
    theirs, ours = (1000 * statistics.median(taken[1:]) for taken in (turns.peer, turns.own))
    ratio = statistics.median(map(truediv, turns.peer[1:], turns.own[1:]))
    print(
        f"{name:7} Trainer {theirs:7.1f} ms ({micro:2} rows), engine {ours:7.1f} ms: ratio {ratio:.3f}",
        end="",
    )
    print(f"   weights {apart / moved:.1e} apart of what they moved", flush=True)
    assert apart < SAME * moved, "not the same work"
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(f"{folder}/model")
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"python {platform.python_version()}, {versions}, {given.threads} threads, {ROWS} rows a step")
        ratios = {n: min(compare(n, f"{folder}/model", given.steps, m) for m in TRIED) for n in SETTINGS}
        dist.destroy_process_group()
    for name, ratio in ratios.items():
        print(f"{name:7} {ratio:.2f} at least (target {SETTINGS[name]})")
    return int(any(ratio < SETTINGS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
