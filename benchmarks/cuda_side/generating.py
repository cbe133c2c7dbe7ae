"""The embedded serve engine: tokens per second, and what a decode step costs beside its arithmetic."""

from __future__ import annotations

import time
from itertools import count

from benchmarks.cuda_side.bench import BIG, Bench, Record, Records

from rlgraph.costs.model_size import size_of
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

ROWS = (64, 256, 1024)


def embedded(bench: Bench) -> Records:
    """Decoding with about 1,024 tokens of context, prefill not counted."""
    path, context, new = str(bench.model(BIG)), bench.size(992, 16), bench.size(64, 4)
    engine = TransformersEngine(path, str(bench.device), "bfloat16", max_cached_tokens=2**21)
    engine.load_pretrained()
    size, seeds = size_of(path), count()
    _seconds(bench, engine, 2, context, 2, seeds)  # what is chosen and made on first use
    for rows in (bench.size(most, most // 64) for most in ROWS):
        short, long = (_seconds(bench, engine, rows, context, most, seeds) for most in (2, 2 + new))
        step = max(long - short, 1e-9) / new
        read = size.multiplied * 2 + rows * (context + new / 2) * size.kv_bytes(2)
        work = {"kind": "generate", "rows": rows, "context": context + new / 2, "seconds": step}
        work |= {
            "config": size.config.model_dump(exclude_defaults=True),
            "layers": size.config.num_hidden_layers,
        }
        label = f"embedded: {rows} rows, context {context}"
        yield Record(
            label,
            rows / step,
            "tokens/s",
            "bytes read at a copy's rate",
            rows * bench.found["copy"] / read,
            "",
            work,
        )
    del engine
    bench.clear()


def _seconds(
    bench: Bench, engine: TransformersEngine, rows: int, context: int, new: int, seeds: count[int]
) -> float:
    """Of one batch; each row has a prompt of its own, and sampling makes fresh tokens each time."""
    engine.stops = engine.stops[:0]  # so that every row runs to its end
    vocabulary, first = bench.size(151936, 512), next(seeds)
    prompts = [
        [3 + (7 * row + 13 * at + first) % (vocabulary - 3) for at in range(context)] for row in range(rows)
    ]
    requests = [Request(prompt, [row]) for row, prompt in enumerate(prompts)]
    bench.wait()
    start = time.perf_counter()
    engine.generate(requests, Sampling(new))
    bench.wait()
    return time.perf_counter() - start
