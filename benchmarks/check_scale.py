"""How the time of checking and planning grows with the graph: 100, 1,000 and 10,000 nodes.

    python benchmarks/check_scale.py

Near linear growth is a ratio near 10 for ten times the nodes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rlgraph.check import check_graph
from rlgraph.request import PlanRequest

TARGETS = {1_000: 2.0, 10_000: 5.0}  # seconds
HEAD = """graph: wide
models:
  policy: {path: org/policy, optimizer: {lr: 1e-6}}
  ref: {path: org/policy, frozen: true}
schedule: {iterations: 1}
nodes:
  prompts: {op: data.prompts, files: [a.jsonl], batch: 8}
  rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 8}
  rewards0: {op: reward.exact}
"""


def main() -> None:
    print(f"python {sys.version.split()[0]}, 8 devices, best of 3")
    before = 0.0
    for count in (100, 1_000, 10_000):
        took = best(count)
        growth = f"  {took / before:5.1f} x the time for 10 x the nodes" if before else ""
        target = f"  (target: under {TARGETS[count]:.0f} s)" if count in TARGETS else ""
        print(f"  {count:>6} nodes {took:7.3f} s{target}{growth}")
        before = took


def best(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.yaml"
        path.write_text(graph(count))
        return min(seconds(path) for _ in range(3))


def seconds(path: Path) -> float:
    start = time.perf_counter()
    check_graph(PlanRequest(str(path), devices=8))
    return time.perf_counter() - start


def graph(count: int) -> str:
    """Branches of five nodes, each with a reward, scores under two models, advantages and an update."""
    branches = [branch(number) for number in range(1, (count - 3) // 5 + 1)]
    return HEAD + "".join(f"  {line}\n" for lines in branches for line in lines)


def branch(n: int) -> list[str]:
    ins = f"{{advantages: advantages{n}, old_logprobs: old{n}, ref_logprobs: ref{n}}}"
    return [
        f"rewards{n}: {{op: reward.exact}}",
        f"old{n}: {{op: logprobs, model: policy, keep: true}}",
        f"ref{n}: {{op: logprobs, model: ref}}",
        f"advantages{n}: {{op: advantage.grpo, in: {{rewards: rewards{n - 1}}}}}",
        f"update{n}: {{op: update.policy, model: policy, kl_coef: 0.1, loss: {{kind: ppo_clip}}, in: {ins}}}",
    ]


if __name__ == "__main__":
    main()
