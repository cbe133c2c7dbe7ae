"""Peak memory of a log-prob pass, and of an update, with a vocabulary of 150k and 8k tokens.

    OMP_NUM_THREADS=2 python benchmarks/logprob_memory.py [--vocabulary 150000] [--tokens 8192]

Each pass runs in a process of its own, on the CPU. What counts is resident memory at its peak over what the
process held before the model was loaded. The bound for the log-probs: 1.25 of weights plus one chunk, the
float32 logits of as many tokens as are projected at once. The update has no bound: it holds gradients and
AdamW's averages too, which with the weights is four times the weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.costs.limits import LOGITS
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet

BOUND = 1.25
SHAPE = {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 2, "num_attention_heads": 14}
ROWS = 16


def write_model(folder: Path, vocabulary: int) -> None:
    """A model with tied embeddings, as the small ones of that vocabulary have them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=True)
    with quiet():
        Qwen2ForCausalLM(config).save_pretrained(folder)


def memory(what: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def columns(vocabulary: int, tokens: int) -> dict[str, Any]:
    rows = torch.randint(0, vocabulary, (ROWS, tokens // ROWS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(rows, dtype=torch.bool)
    return {"tokens": Ragged.of(rows.tolist()), "loss_mask": Ragged.of(mask.tolist(), dtype=torch.bool)}


def score(engine: FsdpEngine, data: dict[str, Any]) -> None:
    engine.logprobs(data["tokens"], data["loss_mask"])


def update(engine: FsdpEngine, data: dict[str, Any]) -> None:
    engine.update(data, objective, torch.arange(ROWS), ROWS)


def objective(batch: Any, totals: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


PASSES: dict[str, tuple[Callable[[FsdpEngine, dict[str, Any]], None], dict[str, Any]]] = {
    "log-probs": (score, {"frozen": True}),
    "update": (update, {"optimizer": {"lr": 1e-3}}),
}


def measure(name: str, root: Path, vocabulary: int, tokens: int) -> None:
    """Run one pass once; print what it takes at its peak."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(root / name), 1))
    run, options = PASSES[name]
    run(FsdpEngine.of(str(root / "warm"), **options), columns(97, 64))  # so that all is imported
    data = columns(vocabulary, tokens)
    before = memory("VmRSS")
    engine = FsdpEngine.of(str(root / "model"), micro_tokens=tokens, **options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of loading, is forgotten
    run(engine, data)
    taken = memory("VmHWM") - before
    weights = 4 * sum(p.numel() for p in engine.model.parameters())
    chunk = 4 * vocabulary * max(1, min(tokens, LOGITS // vocabulary))
    ratio = taken / (weights + chunk)
    whole = 4 * vocabulary * tokens
    print(
        f"{name:10} peak {taken / 2**20:6.0f} MiB; weights {weights / 2**20:.0f}, "
        f"a chunk {chunk / 2**20:.0f}, whole logits {whole / 2**20:.0f} MiB; "
        f"{ratio:.2f} of weights plus a chunk",
        flush=True,
    )
    dist.destroy_process_group()
    if name == "log-probs":
        assert ratio <= BOUND, f"{ratio:.2f} is more than {BOUND}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--one", nargs=2, metavar=("PASS", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        measure(chosen.one[0], Path(chosen.one[1]), chosen.vocabulary, chosen.tokens)
        return
    # glibc else keeps freed blocks of up to 32 MiB for itself
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", chosen.vocabulary)
        write_model(Path(folder) / "warm", 97)
        for name in PASSES:
            subprocess.run([sys.executable, *sys.argv, "--one", name, folder], check=True, env=environment)


if __name__ == "__main__":
    main()
