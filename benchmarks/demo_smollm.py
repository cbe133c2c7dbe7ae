"""How well, and how soon, does the demo of a pretrained model learn? One run per seed, one after the other.

    python benchmarks/demo_smollm.py [--seeds 5] [--folder DIR]

Each run is `rlgraph run demo_smollm pools.main.devices=1 seed=N` in a process of its own. Its time includes
the start of Ray, the loading of the model, both evaluations and the checkpoints; the model is downloaded and
converted before. Prints the accuracy on held-out questions before and after, and the minutes. The targets,
on two idle cores: at most 0.25 before, at least 0.80 after, within 6 minutes, in every seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rlgraph.reports.measured import read_metrics
from rlgraph.runtime.demo_smollm import ONE_DEVICE

BEFORE, AFTER, MINUTES = 0.25, 0.80, 6.0
RLGRAPH = (sys.executable, "-m", "rlgraph")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo_smollm-seeds"), help="of the runs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*RLGRAPH, "demo", "smollm", "--no-run"], check=True)

    print("| seed | before | after | minutes | seconds per iteration, median | load at the start |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for seed in range(options.seeds):
        load, _, _ = os.getloadavg()
        run = options.folder / f"seed-{seed}"
        since = time.monotonic()
        with (options.folder / f"seed-{seed}.log").open("w") as log:
            command = [*RLGRAPH, "run", "demo_smollm", ONE_DEVICE, f"seed={seed}", "--run-dir", str(run)]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        minutes = (time.monotonic() - since) / 60
        before, after, seconds = measured(run)
        missed += before > BEFORE or after < AFTER or minutes > MINUTES
        cells = [
            f"{seed}",
            f"{before:.2f}",
            f"{after:.2f}",
            f"{minutes:.1f}",
            f"{seconds:.1f}",
            f"{load:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{options.seeds - missed} of {options.seeds} seeds meet the targets")
    return 1 if missed else 0


def measured(run: Path) -> tuple[float, float, float]:
    """The first and the last accuracy of a run, and the median of its iterations' seconds."""
    lines = read_metrics(run)
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    seconds = sorted(line["time/step"] for line in lines if "time/step" in line)
    return accuracies[0], accuracies[-1], seconds[len(seconds) // 2]


if __name__ == "__main__":
    sys.exit(main())
