"""How fast is the embedded serve engine beside ``generate`` of transformers?

    python benchmarks/embedded_engine.py --threads 1

Both run the same random Qwen2 of about 605k parameters on the CPU in float32, with the same prompts, samples
a prompt, and forced lengths (no end token); useful tokens are the sum of the lengths for both.
transformers gets ``num_return_sequences``, its default dynamic cache, left padding, and sdpa or eager
attention; rows past their length are declared done, as after an end token, and the call ends with its longest
row. The embedded engine also returns log-probs; transformers is not asked for them. It runs with ``fused.py``
and without, as models do that it does not cover. Runs alternate.

Covered: one process, samples of spread and of equal length. Not covered: CUDA, large models, long prompts.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import click
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

TARGET = 2.0
CONFIG = Qwen2Config(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.06,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
Generate = Callable[[], None]


class RowLengths(StoppingCriteria):
    """Declares row r done after ``lengths[r]`` new tokens."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self.ends = prompt + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def save_model(directory: str) -> int:
    """Write the random model and a tokenizer; returns the number of parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.save_pretrained(directory)
    words = {f"<{i}>": i for i in range(CONFIG.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")))
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of 8 to 24 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 25, (count,), generator=generator).tolist()
    return [torch.randint(2, CONFIG.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def lengths_of(count: int, samples: int, shortest: int, longest: int) -> list[list[int]]:
    """Lengths evenly spread from shortest to longest, dealt out over the samples in a fixed random order."""
    spread = torch.linspace(shortest, longest, count * samples).round().long()
    order = torch.randperm(count * samples, generator=torch.Generator().manual_seed(2))
    return spread[order].view(count, samples).tolist()


def theirs(path: str, attention: str, prompts: list[list[int]], lengths: list[list[int]]) -> Generate:
    """One call of ``generate`` of transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention
    ).eval()
    model.generation_config.eos_token_id = None
    width, flat = max(map(len, prompts)), [n for row in lengths for n in row]
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> None:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=len(lengths[0]),
            max_new_tokens=max(flat),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([RowLengths(width, flat)]),
        )
        assert out.shape == (len(flat), width + max(flat))

    return run


def ours(path: str, prompts: list[list[int]], lengths: list[list[int]], fused: bool = True) -> Generate:
    """One call of the embedded engine, with forced lengths and no stop ids."""
    engine = TransformersEngine(path)
    engine.load_pretrained()
    engine.fused = engine.fused if fused else None
    samples = len(lengths[0])
    requests = [Request(prompt, range(i * samples, (i + 1) * samples)) for i, prompt in enumerate(prompts)]
    sampling, no_stops = Sampling(max(map(max, lengths))), torch.empty(0, dtype=torch.int64)

    def run() -> None:
        out = engine._generate(requests, sampling, lengths, no_stops)
        assert [[len(g.tokens) for g in row] for row in out] == lengths

    return run


def measure(engines: dict[str, Generate], tokens: int, repeats: int) -> dict[str, float]:
    """Median useful tokens per second of each; the engines take turns, after one run each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, run in engines.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: tokens / statistics.median(taken) for name, taken in seconds.items()}


def compare(path: str, shape: tuple[int, int, int, int], repeats: int) -> None:
    """Print one table for (prompts, samples, shortest, longest)."""
    count, samples, shortest, longest = shape
    prompts, lengths = prompts_of(count), lengths_of(*shape)
    tokens = sum(map(sum, lengths))
    engines = {
        "transformers, sdpa": theirs(path, "sdpa", prompts, lengths),
        "transformers, eager": theirs(path, "eager", prompts, lengths),
        "embedded, not fused": ours(path, prompts, lengths, fused=False),
        "embedded": ours(path, prompts, lengths),
    }
    rates = measure(engines, tokens, repeats)
    print(f"\n{count} prompts x {samples} samples of {shortest} to {longest} tokens: {tokens} useful tokens")
    for name, rate in rates.items():
        print(f"  {name:20} {rate:10,.0f} tokens/s")
    best = max(rate for name, rate in rates.items() if name.startswith("transformers"))
    target = f"target {TARGET:.1f}" if shortest < longest else "target 1.0"
    print(f"  ratio to the faster  {rates['embedded'] / best:10.2f} ({target})")


@click.command()
@click.option("--threads", default=1, show_default=True, help="Torch threads, the same for both.")
@click.option("--repeats", default=7, show_default=True, help="Timed runs of each.")
def main(threads: int, repeats: int) -> None:
    """Compare the embedded engine with transformers' generate."""
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"python benchmarks/embedded_engine.py --threads {threads} --repeats {repeats}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as path:
        size = save_model(path)
        print(f"Qwen2, {size:,} parameters, float32, cpu, {threads} thread(s), median of {repeats}")
        for shape in ((32, 8, 4, 64), (32, 8, 4, 4), (32, 8, 64, 64)):
            compare(path, shape, repeats)


if __name__ == "__main__":
    main()
