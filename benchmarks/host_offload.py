"""Memory of a device with the optimizer and inputs of layers on its host, planned and held.

An update of one model on eight ranks, recomputing; what a rank's device holds is counted on fake tensors
(``fake_engine.py``), with no weights and no devices, and is beside what it holds with nothing on the host::

    python benchmarks/host_offload.py [--model Qwen/Qwen3-32B] [--tokens 65536]
"""

from __future__ import annotations

import argparse
import sys

from fake_engine import Setting
from memory_fake import HIGH, LOW, compared

HOST = {
    "nothing": {},
    "optimizer": {"optimizer_offload": True},
    "inputs of layers": {"activation_offload": True},
    "both": {"optimizer_offload": True, "activation_offload": True},
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="Qwen/Qwen3-8B", help="a model with a size card, or a folder")
    arguments.add_argument("--world", type=int, default=8, help="ranks over which the model is sharded")
    arguments.add_argument("--tokens", type=int, default=65536, help="of a micro-batch, which is one row")
    given = arguments.parse_args()
    print(f"{'on the host':18} {'planned':>8} {'held':>8}  planned/held  held/nothing, in GB of 10^9")
    outside, first = 0, 0
    for name, settings in HOST.items():
        row = compared(
            Setting(given.model, world=given.world, tokens=given.tokens, row=given.tokens, **settings)
        )
        first = first or row["held"]
        sums = f"{row['predicted'] / 1e9:8.1f} {row['held'] / 1e9:8.1f}  {row['ratio']:12.3f}"
        print(f"{name:18} {sums}  {row['held'] / first:12.3f}", flush=True)
        outside += not LOW <= row["ratio"] <= HIGH
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
