"""How long `rlgraph check` takes in a fresh process, for every shipped graph.

    python benchmarks/check_startup.py [--repeats 7]

The bound in the same run is a bare Python with the libraries that checking needs imported.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from rlgraph.shipped import shipped_graphs

TARGET_S = 0.5
FLOOR = "import click, pydantic, yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    floor = median([sys.executable, "-c", FLOOR], repeats)
    print(f"python {sys.version.split()[0]}, median of {repeats}")
    print(f"  imports alone       {floor:.3f} s")
    for graph in shipped_graphs():
        took = median([sys.executable, "-m", "rlgraph", "check", graph], repeats)
        print(f"  rlgraph check {graph:<9} {took:.3f} s  (target: {TARGET_S} s)  ratio {took / floor:.2f}")


def median(command: list[str], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
