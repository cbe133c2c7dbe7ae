"""What rows of older weights cost, and what they save: the demo's task, streamed at several staleness.

    python benchmarks/staleness.py [--iterations 150] [--seeds 2]

Each run sees as many samples, on two pools of a core each, and corrects by the ratio to the log-probs that
tokens were drawn with. The model is the one that SFT leaves in `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from rlgraph.runtime.demo import make
from rlgraph.runtime.run import run_graph

SCHEDULES = {
    "synchronous": "",
    "stream, 0": "stream: {staleness: 0}, ",
    "stream, 1": "stream: {staleness: 1}, ",
    "stream, 4": "stream: {staleness: 4}, ",
    "stream, 4, drop": "stream: {staleness: 4, too_old: drop}, ",
}
SPLIT = "pools={train: {devices: 1}, gen: {devices: 1}}"
CORRECTED = "update_policy.in.old_logprobs=rollout_logprobs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make("demo_files")
        run_graph("demo_sft", [], run_dir=Path("runs/demo_sft"), inline=True)
        every = {name: measure(name, options.iterations, options.seeds) for name in SCHEDULES}
    print(f"\naccuracy after {options.iterations} iterations of 512 samples, {options.seeds} seeds")
    whole = every["synchronous"][1]
    for name, (accuracies, seconds, age) in every.items():
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        print(
            f"  {name:<16} {spread}  {seconds:6.3f} s an iteration ({whole / seconds:.2f} x)  age {age:.2f}"
        )


def measure(name: str, iterations: int, seeds: int) -> tuple[list[float], float, float]:
    """Return the accuracy of each seed, the median seconds of an iteration, and the mean age of rows."""
    accuracies, seconds, ages = [], [], []
    for seed in range(seeds):
        schedule = f"schedule={{{SCHEDULES[name]}iterations: {iterations}, save_every: 0}}"
        settings = [
            SPLIT,
            CORRECTED,
            schedule,
            f"seed={seed}",
            "models.policy.path=runs/demo_sft/models/policy",
        ]
        run = run_graph("demo", settings, run_dir=Path(f"{name}-{seed}".replace(" ", "").replace(",", "-")))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        accuracies.append(next(line["eval/accuracy"] for line in reversed(lines) if "eval/accuracy" in line))
        steps = [line for line in lines if "time/step" in line]
        seconds += [line["time/step"] for line in steps]
        ages += [line.get("finished/age", 0.0) for line in steps]
    return accuracies, statistics.median(seconds), statistics.mean(ages)


if __name__ == "__main__":
    main()
