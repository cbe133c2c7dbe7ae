"""Does every shipped algorithm learn? Each trains the demo's SFT model for a while, from the same start.

    make demo                                   # makes the files and the model that this starts from
    python benchmarks/algorithms.py [--iterations 80] [--seeds 1] [--graphs grpo,rloo]

Held-out exact match (greedy) before and after; the ratio is after to before. One seed says little about which
algorithm is better: differences of a few points are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlgraph.compose import compose
from rlgraph.shipped import shipped_graphs
from rlgraph.source import Tree

START = Path("runs/demo_sft/models/policy")
FILES = Path("demo_files")
ELSEWHERE = ("demo", "demo_sft", "sft", "dpo", "distill", "rm_ppo")  # learn from other data, or a model
PROMPTS = "{op: data.prompts, files: [FILE], batch: BATCH, template: plain}"
OPTIMIZER = "{lr: 2e-4, schedule: linear, warmup_steps: 5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--graphs", default=",".join(n for n in shipped_graphs() if n not in ELSEWHERE))
    options = parser.parse_args()
    if not START.is_dir():
        sys.exit(f"there is no {START}: run `make demo` first, and this from the same folder")
    print(f"{options.iterations} iterations of 32 prompts x 8 samples, {options.seeds} seed(s)")
    names, seeds = options.graphs.split(","), range(options.seeds)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each run is a process of one thread
        runs = {name: [pool.submit(run, name, options.iterations, seed) for seed in seeds] for name in names}
        for name in names:
            report(name, [future.result() for future in runs[name]])


def report(name: str, results: list[tuple[float, float]]) -> None:
    """A line of the table: means over seeds, and how far apart the seeds end."""
    before, after = (sum(values) / len(values) for values in zip(*results, strict=True))
    spread = max(value for _, value in results) - min(value for _, value in results)
    line = f"{before:.3f} -> {after:.3f}  spread {spread:.3f}  ratio {after / before:.2f}"
    print(f"  {name:<22} {line}", flush=True)


def run(name: str, iterations: int, seed: int) -> tuple[float, float]:
    """Held-out accuracy of one run before and after, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        graph, run_dir = Path(folder) / f"{name}.yaml", Path(folder) / "run"
        graph.write_text(edited(name, compose(name).items, iterations, seed))
        command = [sys.executable, "-m", "rlgraph", "run", str(graph), "--inline", "--run-dir", str(run_dir)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines[0]["eval/accuracy"], lines[-1]["eval/accuracy"]


def edited(name: str, sections: dict[str, Tree], iterations: int, seed: int) -> str:
    """A shipped graph on the demo's task: its nodes stay, but for the data and the reward."""
    nodes = sections["nodes"].items
    train, test = (str((FILES / file).resolve()) for file in ("train.parquet", "test.parquet"))
    reward = next(node for node, body in nodes.items() if body.plain()["op"] == "reward.math")
    held_out = f"{{prompts: {{files: [{test}], batch: all}}, rollout: {{n: 1, temperature: 0}}}}"
    edits = [
        f"set: {{seed: {seed}, models.policy.path: {START.resolve()}, models.policy.optimizer: {OPTIMIZER}}}",
        "set: {rollout.n: 8, rollout.max_new_tokens: 8}",
        f"replace: {{prompts: {PROMPTS.replace('FILE', train).replace('BATCH', '32')}}}",
        f"replace: {{{reward}: {{op: reward.exact}}, schedule: {{iterations: {iterations}}}}}",
        *(
            f"set: {{{node}.buffer: 2}}"
            for node, body in nodes.items()
            if body.plain()["op"] == "reward.overlong"
        ),
        *(["set: {models.critic.optimizer.lr: 1e-3}"] if "critic" in sections["models"].items else []),
        f"add: {{eval: {{nodes: {held_out}, report: {{accuracy: {reward}}}}}}}",
    ]
    return f"graph: {name}\nextends: {name}\nedits:\n" + "".join(f"  - {edit}\n" for edit in edits)


if __name__ == "__main__":
    main()
