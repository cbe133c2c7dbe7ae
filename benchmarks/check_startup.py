"""How long `rlgraph check` takes in a fresh process, for every shipped graph.

    python benchmarks/check_startup.py [--repeats 7] [GRAPH ...]

Seconds are those of the CPU, user and system, which other work on the machine hardly changes; where there
is none, a check takes as long. The bound is Python with the libraries that checking needs imported.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

from rlgraph.frontend.shipped import shipped_graphs

TARGET_S = 0.5
FLOOR = "import click, pydantic, yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("graphs", nargs="*", default=[*shipped_graphs()])
    options = parser.parse_args()
    floor = median([sys.executable, "-c", FLOOR], options.repeats)
    print(f"python {sys.version.split()[0]}, CPU seconds, median of {options.repeats}")
    print(f"  imports alone         {floor:.3f} s")
    for graph in options.graphs:
        took = median([sys.executable, "-m", "rlgraph", "check", graph], options.repeats)
        shares = f"{took / floor:.2f} of the imports, {took / TARGET_S:.2f} of the target"
        print(f"  rlgraph check {graph:<21} {took:.3f} s  {shares}")


def median(command: list[str], repeats: int) -> float:
    """CPU seconds of a command, once it has run before."""
    return statistics.median([seconds(command) for _ in range(repeats + 1)][1:])


def seconds(command: list[str]) -> float:
    """User and system seconds of a command and what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
