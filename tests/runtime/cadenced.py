"""Short runs of the demo's task that keep every checkpoint, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
DATA = "demo_files/train.parquet"


def graph(base: str, *edits: str) -> str:
    """A graph file of the demo's model and task, with a reward that any model earns some of."""
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 1e-3}}}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 4, template: plain}}}}",
        "set: {rollout.n: 3, rollout.max_new_tokens: 6, schedule: {iterations: 4, save_every: 1, keep: 9}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def ran(path: str, run_dir: str, steps: int | None = None, resume: bool = False) -> list[dict[str, Any]]:
    """Run a graph; its metrics, without what depends on wall time."""
    run_graph(path, (), 2, inline=True, steps=steps, run_dir=Path(run_dir), resume=resume)
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


def versions(run_dir: str) -> list[dict[str, int]]:
    """After each iteration."""
    states = sorted(Path(run_dir, "checkpoints").glob("*/state.json"))
    return [json.loads(state.read_text())["versions"] for state in states]


def checkpoint(run_dir: str, iteration: int, model: str = "policy") -> dict[str, Any]:
    """The weights of a model after an iteration, by their names."""
    path = f"{run_dir}/checkpoints/step-{iteration:06d}/{model}/shard-00000-of-00001.safetensors"
    return {n.removeprefix("model."): w for n, w in load_file(path).items() if n.startswith("model.")}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether weights are equal bit for bit."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
