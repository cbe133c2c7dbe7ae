"""An update of TRL's GRPOTrainer on the same rows, where TRL is installed: the peer of our own update.

It is the trainer's own loop; only the rows that it would generate are given to it, in micro-batches of rows
of like length, as many as have room. It is tried with large and small micro-batches, with activations kept
and computed again, and keeps what is fastest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.cuda_side.bench import BIG, Bench, Record, Records
from benchmarks.cuda_side.training import GROUP, Rows, rows, update

from rlgraph.runtime.engines.fsdp.batching import micro_batch_rows

STEPS, WARM = 4, 1  # optimizer steps of a try, and those of them that are not counted


def trl_update(bench: Bench) -> Records:
    """Tokens per second of our update, packed, against TRL's; skipped where TRL is not installed."""
    try:
        import trl  # noqa: F401
    except ImportError as missing:
        raise LookupError(f"TRL can't be imported: {missing}") from missing
    micro = bench.size(16384, 512)
    given = rows(bench, "exponential", 2 * micro, 0)
    path = bench.model(BIG)
    tries = [(True, micro), (True, micro // 4), (False, micro // 4)]
    theirs: dict[tuple[bool, int], float] = {}
    for recompute, tokens in tries:
        with suppress(torch.OutOfMemoryError):  # TRL holds the logits of a whole micro-batch
            seconds = _trl_seconds(bench, path, _batches(given, tokens), recompute)
            theirs[recompute, tokens] = seconds
        bench.clear()
    with bench.engine(BIG, micro_tokens=micro, recompute=True) as engine:
        ours = bench.seconds(lambda: update(engine, given), repeats=3, warm=2)
    recompute, tokens = min(theirs, key=theirs.__getitem__)
    name = f"GRPOTrainer, {tokens} tokens at a time, {'recomputed' if recompute else 'kept'}"
    rate, peer = given.tokens / ours, given.tokens / min(theirs.values())
    yield Record("update beside TRL's", rate, "tokens/s", name, peer, ">= 1.0")


def _batches(given: Rows, micro: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches as TRL has them: prompts padded on the left, completions on the right."""
    tokens, mask = given.columns["tokens"], given.columns["loss_mask"]
    made = [
        _batch(tokens.take(chosen), mask.take(chosen)) for chosen in micro_batch_rows(given.lengths, micro)
    ]
    total = sum(batch["completion_mask"].sum() for batch in made)
    return [batch | {"num_items_in_batch": total} for batch in made]


def _batch(tokens: Any, mask: Any) -> dict[str, torch.Tensor]:
    prompts = [row[~own] for row, own in zip(tokens, mask, strict=False)]
    completions = [row[own] for row, own in zip(tokens, mask, strict=False)]
    prompt, prompt_mask = _padded(prompts, left=True)
    completion, completion_mask = _padded(completions, left=False)
    found = {"prompt_ids": prompt, "prompt_mask": prompt_mask}
    found |= {"completion_ids": completion, "completion_mask": completion_mask}
    return found | {"advantages": torch.randn(len(prompts))}


def _padded(parts: Sequence[torch.Tensor], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``[rows, longest]`` of ids, and of what is no padding."""
    width = max(map(len, parts))
    sides = [(width - len(part), 0) if left else (0, width - len(part)) for part in parts]
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(part, side) for part, side in zip(parts, sides, strict=True)])
    kept = [pad(torch.ones_like(part), side) for part, side in zip(parts, sides, strict=True)]
    return ids, torch.stack(kept)


def _trl_seconds(
    bench: Bench, path: Path, batches: Sequence[Mapping[str, torch.Tensor]], recompute: bool
) -> float:
    """The median of TRL's optimizer steps on these micro-batches."""
    import transformers
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            bench.wait()
            marks.append(time.perf_counter())

        on_step_end = on_step_begin

    class GivenRows(GRPOTrainer):
        """Trains on rows that are there already."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            batch = batches[self._step % len(batches)]
            return {name: tensor.to(bench.device) for name, tensor in batch.items()}

    transformers.logging.set_verbosity_error()
    trainer = GivenRows(
        model=str(path),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=_config(bench, len(batches), recompute),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * (GROUP * len(batches))),
        callbacks=[Clock()],
    )
    trainer.train()
    steps = sorted(after - before for before, after in zip(marks[::2], marks[1::2], strict=True))[WARM:]
    return steps[len(steps) // 2]


def _config(bench: Bench, batches: int, recompute: bool) -> Any:
    """GRPO with one step of the clipped loss as a mean over tokens, as the objective here is one."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(bench.folder / "trl"),
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        use_cpu=not bench.is_cuda,
        bf16=True,
        gradient_checkpointing=recompute,
        max_steps=STEPS,
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=batches,
        num_generations=GROUP,
        beta=0.0,
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
