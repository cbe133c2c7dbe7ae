"""How long planning for a cluster takes, and how close the search over layouts comes to trying everything.

    python benchmarks/planning.py

Planning is timed in a fresh process, start-up included, as a user meets it. The search is held against every
split of 16 devices with the same groups and micro-batches, and against the layout that the graph has.

Then large models: what the search chooses, why, and in how long; and the predicted step beside those that
NeMo RL v0.4 publishes (docs/about/performance-summary.md of NVIDIA-NeMo/RL: on policy, H100, bfloat16,
Megatron-core and vLLM). Its tokens per second, over the samples of a step, leave some 110 for a prompt.
Not published, and taken here: a pass of a reference, and how many samples a prompt has: so many that each
device has a prompt, which it generates whole. DeepSeek V3 on 256, which is published too, is left out: no
server of one host holds it. ``--large`` runs these alone.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from rlgraph.compiler import compile_graph
from rlgraph.costs.hardware import FOLDER
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.reports.layout_search import Candidate, autoplace, layouts, overrides
from rlgraph.reports.layout_text import contest_text
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
# model, devices, most tokens of a row, mean of a response, prompts, samples of one, mini-batches, seconds
PUBLISHED = [
    ("meta-llama/Llama-3.1-8B", 16, 4_096, 1_060, 64, 32, 4, 97.7),
    ("Qwen/Qwen3-32B", 32, 4_096, 3_206, 64, 32, 4, 393),
    ("Qwen/Qwen3-30B-A3B", 32, 4_096, 3_154, 64, 32, 4, 225),
    ("Qwen/Qwen3-235B-A22B", 128, 8_192, 5_671, 128, 4, 1, 506),
]
PROMPT = 110  # tokens of a prompt


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
    found, best = autoplace(graph, MODEL, Target(cluster))
    took = time.perf_counter() - start
    default = seconds(compile_graph(graph, MODEL, target=Target(cluster)))
    print(
        f"  search of 64 devices for {graph}: {len(found)} layouts in {took:.1f} s "
        f"(target: under {SEARCH:.0f} s); the best takes {seconds(best) / default:.2f} of the time of the "
        "graph's own layout (target: at most 1)"
    )


def _against_everything(graph: str, cluster: str) -> None:
    target = Target(cluster)
    found, _ = autoplace(graph, MODEL, target)
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
    for model, devices, longest, mean, prompts, samples, minibatches, took in PUBLISHED:
        given = [*_paths(model), f"prompts.batch={prompts}", f"rollout.n={samples}"]
        given += [f"rollout.max_new_tokens={longest - PROMPT}", "prompts.max_prompt_tokens=256"]
        given += [f"update_policy.minibatches={minibatches}"]
        target = Target(_cluster(folder, devices), prompt_tokens=PROMPT, response_tokens=mean)
        candidates, best = _placed(given, target)
        print(f"  {model} on {devices}: NeMo RL took {took} s; planned {_range(best)}, at best and worst:")
        slow = [step for step in best.steps if step.seconds and step.seconds[0] > 0.01 * took]
        print("    " + ", ".join(f"{step.node} {_of(step)}" for step in slow))
        print(f"    {' '.join(overrides(candidates[0].settings))}")


def _placed(given: list[str], target: Target) -> tuple[list[Candidate], Plan]:
    start, used = time.perf_counter(), time.process_time()
    candidates, best = autoplace("grpo", given, target)
    took, used = time.perf_counter() - start, time.process_time() - used
    print(f"  {len(candidates)} layouts in {took:.1f} s, {used:.1f} s of a processor")
    return candidates, best


def _paths(model: str) -> list[str]:
    return [f"models.{name}.path={model}" for name in ("policy", "ref")]


def _range(plan: Plan) -> str:
    assert plan.predicted
    return range_text(plan.predicted.seconds)


def _of(step: Step) -> str:
    assert step.seconds
    return f"{step.seconds[0]:,.0f} to {step.seconds[1]:,.0f} s"


def seconds(plan: Plan) -> float:
    """The middle of the predicted range."""
    assert plan.predicted
    return math.sqrt(math.prod(plan.predicted.seconds))


if __name__ == "__main__":
    main()
