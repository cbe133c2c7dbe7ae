"""CPU time of `rlgraph check` and `rlgraph plan` in a fresh process, beside another build of rlgraph.

    python benchmarks/check_time.py --beside ../other/checkout [--repeats 15] [GRAPH ...]

Each build is run by the interpreter in its checkout's `.venv`, in turn, so that other work on the
machine slows both alike; the first round, in which Python writes its caches, does not count. Seconds are
user and system. `check_startup.py` compares all shipped graphs with the imports of libraries alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
COMMANDS = ("check", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path, required=True, help="another checkout, with its .venv")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("graphs", nargs="*", default=["grpo"])
    options = parser.parse_args()
    print(f"python {sys.version.split()[0]}, CPU seconds, median (least) of {options.repeats}")
    for graph in options.graphs:
        for command in COMMANDS:
            beside, here = measured(command, graph, (options.beside.resolve(), HERE), options.repeats)
            ratio, of_least = statistics.median(here) / statistics.median(beside), min(here) / min(beside)
            seconds = f"{summary(beside)} beside, {summary(here)} here"
            print(f"  rlgraph {command} {graph}: {seconds}, ratio {ratio:.2f} ({of_least:.2f})")


def summary(seconds: list[float]) -> str:
    """Return the median, and the least in brackets."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}) s"


def measured(command: str, graph: str, checkouts: tuple[Path, Path], repeats: int) -> list[list[float]]:
    """Return the CPU seconds of a command in each checkout, in turn."""
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    for _ in range(repeats + 1):
        for checkout in checkouts:
            seconds[checkout].append(cpu_seconds(checkout, command, graph))
    return [values[1:] for values in seconds.values()]


def cpu_seconds(checkout: Path, command: str, graph: str) -> float:
    """Return the user and system seconds of one command."""
    # without its caches, each process would compile all that it imports
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [checkout / ".venv/bin/rlgraph", command, graph],
        check=True,
        capture_output=True,
        cwd=checkout,
        env=environment,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
