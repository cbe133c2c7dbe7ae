"""What do rounds of a few tokens cost, where the embedded engine keeps slots between them, and where not?

    python benchmarks/kept_slots.py --threads 1

The model, prompts and forced lengths of `embedded_engine.py`, in float32. Rounds give every sample
that has not ended at most so many tokens, as `rollout.partial` does; one call gives each all of its own. With
slots kept a sample goes on where it was; without, a round reads first what it has. Runs alternate; rates are
of useful tokens. On the CPU all draw the same tokens, and seconds are those of the process, whatever runs
beside it.

Covered: one process, samples of spread lengths. Not covered: large models, servers.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time

import click
import torch
import transformers
from embedded_engine import Generate, lengths_of, prompts_of, save_model

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

Drawn = list[list[int]]


def rounds(engine: TransformersEngine, prompts: Drawn, lengths: list[int], chunk: int, stays: bool) -> Drawn:
    """Return the tokens of a sample of each prompt, of these lengths, drawn by rounds of a chunk."""
    drawn: Drawn = [[] for _ in prompts]
    sampling, no_stops = Sampling(max(lengths)), torch.empty(0, dtype=torch.int64, device=engine.device)
    while here := [i for i, length in enumerate(lengths) if len(drawn[i]) < length]:
        requests = [Request([*prompts[i], *drawn[i]], [i], drawn=len(drawn[i])) for i in here]
        limits = [[min(chunk, lengths[i] - len(drawn[i]))] for i in here]
        for i, (one,) in zip(
            here, engine._generate(requests, sampling, limits, no_stops, stays=stays), strict=True
        ):
            drawn[i] += one.tokens
    return drawn


def measure(ways: dict[str, Generate], tokens: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Median useful tokens per second of each; they take turns, after one run each to warm up."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            start = clock()
            run()
            if repeat:
                seconds[name].append(clock() - start)
    return {name: tokens / statistics.median(taken) for name, taken in seconds.items()}


def compare(
    engine: TransformersEngine, count: int, longest: int, chunks: tuple[int, ...], repeats: int
) -> None:
    """Print one table: a call, and rounds of each chunk with slots kept and without."""
    prompts, lengths = prompts_of(count), [n for (n,) in lengths_of(count, 1, 8, longest)]
    expected = rounds(engine, prompts, lengths, longest, False)

    def drawing(chunk: int, stays: bool) -> Generate:
        def run() -> None:
            drawn = rounds(engine, prompts, lengths, chunk, stays)
            assert drawn == expected if engine.device.type == "cpu" else [*map(len, drawn)] == lengths

        return run

    ways = {"one call": drawing(longest, False)}
    for chunk in chunks:
        ways |= {
            f"rounds of {chunk}, {name}": drawing(chunk, name == "kept") for name in ("kept", "read anew")
        }
    rates = measure(ways, sum(lengths), repeats, engine.device)
    print(f"\n{count} samples of 8 to {longest} tokens: {sum(lengths)} useful tokens")
    for name, rate in rates.items():
        print(f"  {name:24} {rate:10,.0f} tokens/s  {rate / rates['one call']:5.2f} of one call")
    for chunk in chunks:
        kept, anew = (rates[f"rounds of {chunk}, {name}"] for name in ("kept", "read anew"))
        print(f"  ratio, rounds of {chunk:<8} {kept / anew:10.2f}")


@click.command()
@click.option("--threads", default=1, show_default=True, help="Torch threads.")
@click.option("--device", default="cpu", show_default=True, help="Where the model is.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs of each.")
def main(threads: int, device: str, repeats: int) -> None:
    """Compare rounds that keep slots with rounds that read samples anew, and with one call."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    print(f"python benchmarks/kept_slots.py --threads {threads} --device {device} --repeats {repeats}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as path:
        size = save_model(path)
        print(f"Qwen2, {size:,} parameters, float32, {device}, {threads} thread(s), median of {repeats}")
        engine = TransformersEngine(path, device)
        engine.load_pretrained()
        compare(engine, 64, 224, (64, 16), repeats)


if __name__ == "__main__":
    main()
