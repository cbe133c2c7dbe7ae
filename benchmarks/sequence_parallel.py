"""Memory of ranks that share the tokens of long rows, planned and held (``train.sequence_parallel``).

One row of 32k to 256k tokens is an update's whole micro-batch, on eight ranks of which 1 to 8 share it, or on
more that all do; where these outnumber the key heads, in rings. What a rank holds and what it receives in the
exchanges of attention is counted on fake tensors (``fake_engine.py``), with no weights and no devices::

    python benchmarks/sequence_parallel.py [--model Qwen/Qwen3-8B] [--keep] [--ranks 16 64]
"""

from __future__ import annotations

import argparse
import sys

from fake_engine import Setting, collected
from memory_fake import compared, predicted_bytes

from rlgraph.costs.limits import ring_ranks
from rlgraph.costs.model_size import size_of

K = 1024
LENGTHS = (32 * K, 64 * K, 128 * K, 256 * K)
RANKS = (1, 2, 4, 8, 16, 32, 64)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="Qwen/Qwen3-8B", help="a model with a size card, or a folder")
    arguments.add_argument("--keep", action="store_true", help="keep activations, not compute them again")
    arguments.add_argument("--world", type=int, default=8, help="ranks over which the model is sharded")
    arguments.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="ranks that share a row")
    given = arguments.parse_args()
    heads = size_of(given.model).config.key_heads
    head = f"{'tokens':>8} {'ranks':>5} {'ring':>5} {'planned':>8} {'held':>8}  ratio"
    print(f"{head}   {'activations':<13} exchanged, in GB of 10^9")
    ratios = []
    for tokens in LENGTHS:
        for ranks in given.ranks:
            world = max(given.world, ranks)
            ranked = {"world": world, "sequence": ranks, "recompute": not given.keep}
            setting = Setting(given.model, tokens=tokens, row=tokens, **ranked)
            row = compared(setting)
            planned, held = row["parts"].get("activations", (0, 0))
            sums = f"{row['predicted'] / 1e9:8.1f} {row['held'] / 1e9:8.1f}  {row['ratio']:.3f}"
            moved = [count(setting)["alltoall_base_"] for count in (predicted_bytes, collected)]
            words = [f"{pair[0] / 1e9:.2f}/{pair[1] / 1e9:.2f}" for pair in ((planned, held), moved)]
            ring = ring_ranks(heads, ranks)
            print(f"{tokens:>8,} {ranks:>5} {ring:>5} {sums}   {words[0]:<13} {words[1]}", flush=True)
            ratios += [row["ratio"], *([moved[0] / moved[1]] if ranks > 1 else [])]
    outside = [ratio for ratio in ratios if not 0.98 <= ratio <= 1.15]
    print(f"planned / held from {min(ratios):.3f} to {max(ratios):.3f}; {len(outside)} outside 0.98 to 1.15")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
