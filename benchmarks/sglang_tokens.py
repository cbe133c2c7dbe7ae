"""How many tokens per second come through our client, beside SGLang's own offline engine?

    PYTHONPATH=runtime/engines/sglang/cpu .sglang/bin/python benchmarks/sglang_tokens.py

Both run the same model with the same settings, prompts, samples and log-probs, and take turns; the one that
waits sleeps. Ours speaks HTTP to a server, a request a sample; theirs (``sglang.Engine``) hands a whole batch
to its scheduler within the process. Lengths are forced: a sample ends at its limit, or at an end token, which
a random model hardly ever writes; what was written is what counts.

Covered: one server on one device. Not covered: several servers, long prompts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import sglang
import torch
from sglang_model import VOCABULARY, save_model

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.sglang.engine import SglangEngine

TARGET = 0.95
Generate = Callable[[], int]


def ours(engine: SglangEngine, prompts: list[list[int]], samples: int, longest: int) -> Generate:
    """Generate through our client; returns the tokens written."""
    requests = [Request(prompt, range(samples)) for prompt in prompts]

    def run() -> int:
        made = engine.generate(requests, Sampling(longest))
        return sum(len(one.tokens) for many in made for one in many)

    return run


def theirs(engine: sglang.Engine, prompts: list[list[int]], samples: int, longest: int) -> Generate:
    """The same with SGLang's offline engine."""
    ids = [prompt for prompt in prompts for _ in range(samples)]
    settings = {"max_new_tokens": longest, "temperature": 1.0}

    def run() -> int:
        made = engine.generate(input_ids=ids, sampling_params=settings, return_logprob=True)
        return sum(len(one["output_ids"]) for one in made)

    return run


@click.command()
@click.option("--hidden", default=256, show_default=True, help="The model's width.")
@click.option("--layers", default=4, show_default=True, help="Its layers.")
@click.option("--prompts", default=16, show_default=True)
@click.option("--samples", default=4, show_default=True, help="Of each prompt.")
@click.option("--longest", default=64, show_default=True, help="New tokens of a sample.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs of each.")
def main(hidden: int, layers: int, prompts: int, samples: int, longest: int, repeats: int) -> None:
    """Compare our client with SGLang's offline engine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (prompts, 16), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as path:
        save_model(path, hidden, layers)
        engine = SglangEngine(path, device, dtype, logs=Path(path, "logs"))
        engine.load_pretrained()
        launch = engine.supervisor.launch
        os.environ |= launch.environment(os.environ, engine.supervisor.devices)  # the same cores
        peer = sglang.Engine(**launch.settings())
        runs = {
            "sglang.Engine": theirs(peer, ids, samples, longest),
            "our client": ours(engine, ids, samples, longest),
        }
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                tokens = run()
                if repeat:
                    rates[name].append(tokens / (time.perf_counter() - start))
        peer.shutdown()
        engine.close()
    print(f"sglang {sglang.__version__}, torch {torch.__version__}, {device}, {dtype}, median of {repeats}")
    print(f"{prompts} prompts x {samples} samples of {longest} tokens, width {hidden}, {layers} layers")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        print(f"  {name:14} {rate:10,.0f} tokens/s")
    print(f"  ratio          {medians['our client'] / medians['sglang.Engine']:10.2f}  (target {TARGET})")


if __name__ == "__main__":
    main()
