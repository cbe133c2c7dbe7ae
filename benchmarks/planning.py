"""How long planning for a cluster takes, and how close the search over layouts comes to trying everything.

    python benchmarks/planning.py

Planning is timed in a fresh process, start-up included, as a user meets it. The search is held against every
split of 16 devices with the same groups and micro-batches, and against the layout that the graph has.

Then large models: what the search chooses, why, and in how long; ``--large`` runs these alone.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.costs.hardware import FOLDER
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.request import PlanRequest
from rlgraph.search.candidate import Candidate
from rlgraph.search.layout_search import layouts
from rlgraph.search.text import contest_text
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import range_text

MODEL = ["models.policy.path=Qwen/Qwen2.5-7B", "models.policy.serve.dtype=bfloat16"]
MODEL += [f"models.{name}.train.dtype=bfloat16" for name in ("policy", "ref")]
MODEL += [f"models.{name}.train.micro_tokens=4096" for name in ("policy", "ref")]
TARGETS = {1_024: 2.0, 8_192: 10.0}  # seconds to plan grpo for so many devices
SEARCH = 30.0  # seconds to search 64 devices
LARGE = [  # model, devices, new tokens
    ("Qwen/Qwen3-32B", 8, 7_168),
    ("Qwen/Qwen3-32B", 64, 65_024),
    ("Qwen/Qwen3-235B-A22B", 128, 32_256),
]


def main() -> None:
    print(f"python {sys.version.split()[0]}, grpo of 7B, best of 3, process start included")
    with tempfile.TemporaryDirectory() as folder:
        if "--large" in sys.argv:
            _large(Path(folder))
            return
        before = 0.0
        for devices, most in TARGETS.items():
            took = min(_plan(_cluster(Path(folder), devices)) for _ in range(3))
            growth = f"  {took / before:5.2f} x the time for 8 x the devices" if before else ""
            print(f"  {devices:>6,} devices {took:7.3f} s  (target: under {most:.0f} s){growth}")
            before = took
        for graph in ("grpo", "decoupled_ppo"):
            _search(graph, _cluster(Path(folder), 64))
        for graph in ("grpo", "decoupled_ppo"):
            _against_everything(graph, _cluster(Path(folder), 16))
        _large(Path(folder))


def _cluster(folder: Path, devices: int) -> str:
    path = folder / f"h100-{devices}.yaml"
    text = (FOLDER / "h100-8.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("hosts: 1", f"hosts: {devices // 8}").replace("h100-8", f"h100-{devices}"))
    return str(path)


def _plan(cluster: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlgraph", "plan", "grpo", "--cluster", cluster, *MODEL]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def _search(graph: str, cluster: str) -> None:
    start = time.perf_counter()
    found, compilation = autoplace(PlanRequest(graph, MODEL, target=Target(cluster)))
    best = compilation.plan
    took = time.perf_counter() - start
    default = seconds(compile_graph(graph, MODEL, target=Target(cluster)))
    print(
        f"  search of 64 devices for {graph}: {len(found)} layouts in {took:.1f} s "
        f"(target: under {SEARCH:.0f} s); the best takes {seconds(best) / default:.2f} of the time of the "
        "graph's own layout (target: at most 1)"
    )


def _against_everything(graph: str, cluster: str) -> None:
    target = Target(cluster)
    found, _ = autoplace(PlanRequest(graph, MODEL, target=target))
    plan = compile_graph(graph, MODEL, target=target)
    times = []
    for layout in layouts(plan, range(16), 8):
        try:
            made = compile_graph(graph, [*MODEL, *overrides(layout.settings(plan, 16))], target=target)
        except GraphError:
            continue
        times.append(seconds(made))
    print(
        f"  search of 16 devices for {graph}: {len(found)} layouts, the best takes "
        f"{found[0].seconds / min(times):.3f} of the best of all {len(times)} that fit (target: at most 1.1)"
    )


def _large(folder: Path) -> None:
    for model, devices, tokens in LARGE:
        given = [*_paths(model), f"rollout.max_new_tokens={tokens}"]
        candidates, best = _placed(given, Target(_cluster(folder, devices)))
        print(f"  {model} on {devices} x H100, {tokens:,} new tokens: {_range(best)}")
        print(textwrap.indent(contest_text(candidates), "    "))


def _placed(given: list[str], target: Target) -> tuple[list[Candidate], Plan]:
    start, used = time.perf_counter(), time.process_time()
    candidates, compilation = autoplace(PlanRequest("grpo", given, target=target))
    best = compilation.plan
    took, used = time.perf_counter() - start, time.process_time() - used
    print(f"  {len(candidates)} layouts in {took:.1f} s, {used:.1f} s of a processor")
    return candidates, best


def _paths(model: str) -> list[str]:
    return [f"models.{name}.path={model}" for name in ("policy", "ref")]


def _range(plan: Plan) -> str:
    assert plan.predicted
    return range_text(plan.predicted.seconds)


def seconds(plan: Plan) -> float:
    """The middle of the predicted range."""
    assert plan.predicted
    return math.sqrt(math.prod(plan.predicted.seconds))


if __name__ == "__main__":
    main()
