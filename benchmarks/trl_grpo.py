"""How fast is an iteration of GRPO beside TRL's GRPOTrainer, on the same CPU?

    python -m venv ~/.cache/rlgraph/trl
    ~/.cache/rlgraph/trl/bin/pip install -r benchmarks/trl_side/requirements.txt
    apt-get install libtcmalloc-minimal4 libjemalloc2      # allocators that may serve TRL better
    python benchmarks/trl_grpo.py [--settings short,ragged] [--rounds 5] [--cpu]

Both train the demo's model (0.6 M parameters, float32) on 32 prompts x 8 samples an iteration, with one AdamW
step of the clipped loss as a mean over tokens and no reference; from the same weights, on the same questions,
by random numbers of their own. ``short`` is the demo's addition, answers of 3 to 8 tokens; in ``ragged`` the
question says how many tokens the answer has, 2 to 61 of at most 64, and the reward how near it came.

TRL runs in one process of a thread a core; before the rounds it is tried with each attention, micro-batch and
allocator that there is, and keeps the fastest. rlgraph is run by ``rlgraph run``, a worker of one thread a
core, with that allocator too. In a round each runs once, one after the other; the ratio is the median over
rounds. An iteration lasts from the end of the one before, so all is counted but the start, told apart.

On a machine that others use, ``--cpu`` compares CPU seconds instead: each side is one process of one thread
(rlgraph ``--inline``), and an iteration costs what a run costs more than one of ``WARMUP`` iterations. That
leaves out what two cores make of it: threads that wait for each other, ranks that do, and Ray.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlgraph.runtime.demo import make, make_model, write_parquet

SIDE = Path(__file__).parent / "trl_side"
CACHE = Path.home() / ".cache/rlgraph"
SAMPLES, WARMUP, LAST = 256, 5, 10
ALLOCATORS = ("libtcmalloc_minimal.so.*", "libjemalloc.so.*")


@dataclass(frozen=True)
class Setting:
    """What both sides do."""

    target: float
    reward: str
    max_new_tokens: int
    iterations: int


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    rate: float  # samples a second, without the first iterations
    reward: float  # mean of the last iterations
    length: float  # tokens of an answer
    start: float  # seconds of the process outside its iterations
    cpu: float  # CPU seconds of the process


@dataclass(frozen=True)
class Task:
    """A setting with its files, and how it is measured."""

    name: str
    setting: Setting
    model: Path
    data: Path
    python: Path  # of TRL's environment
    devices: int
    cpu: bool

    @property
    def threads(self) -> int:
        """Of TRL's process."""
        return 1 if self.cpu else os.cpu_count() or 1


SETTINGS = {"short": Setting(1.2, "exact", 8, 40), "ragged": Setting(2.0, "closeness", 64, 20)}
# what TRL is tried with, one after the other, each time with the best so far
CHOICES = {"attention": ("eager", "sdpa"), "micro-batch": (256, 64)}


def main() -> None:
    options = parsed()
    python = options.trl / "bin/python"
    if not python.exists():
        print(f"skipped: there is no {python}; the top of {__file__} says how to make it")
        return
    print(f"rlgraph: torch {version('torch')}, transformers {version('transformers')}, ray {version('ray')}")
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
    found = {package["name"]: package["version"] for package in json.loads(listed.stdout)}
    print("TRL:     " + ", ".join(f"{name} {found[name]}" for name in ("trl", "torch", "transformers")))
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {options.rounds} rounds")
    for name in options.settings.split(","):
        model, data = start(name, options.starts.resolve() / name)
        task = Task(name, SETTINGS[name], model, data, python, options.devices, options.cpu)
        compare(task, options.rounds, options.iterations or task.setting.iterations)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl", type=Path, default=CACHE / "trl", help="a virtual environment with TRL")
    parser.add_argument(
        "--starts", type=Path, default=CACHE / "trl_grpo", help="where models after SFT are kept"
    )
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=0, help="of a run; the setting's own unless given")
    parser.add_argument("--devices", type=int, default=os.cpu_count(), help="rlgraph's workers")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds of one thread")
    return parser.parse_args()


def compare(task: Task, count: int, iterations: int) -> None:
    """Rounds of one setting, and the medians over them."""
    chosen, preload = tune(task)
    words = ", ".join([*(f"{key} {value}" for key, value in chosen.items()), Path(preload).name or "malloc"])
    print(f"\n{task.name}: {SAMPLES} samples of at most {task.setting.max_new_tokens} tokens; TRL: {words}")
    rounds: list[tuple[Outcome, Outcome]] = []
    for seed in range(count):
        theirs = measured(task, iterations, lambda n, seed=seed: trl(task, n, seed, chosen, preload))
        ours = measured(task, iterations, lambda n, seed=seed: rlgraph(task, n, seed, preload))
        rounds.append((theirs, ours))
        pair = f"TRL {theirs.rate:7.0f}, rlgraph {ours.rate:7.0f}"
        print(f"  round {seed + 1}: {pair}  {ours.rate / theirs.rate:.2f}", flush=True)
    for side, outcomes in zip(("TRL", "rlgraph"), zip(*rounds, strict=True), strict=True):
        rate, reward, length, begun = (
            statistics.median(getattr(outcome, field) for outcome in outcomes)
            for field in ("rate", "reward", "length", "start")
        )
        rest = f"reward {reward:.3f}, {length:.1f} tokens an answer, start and end {begun:.1f} s"
        print(f"  {side:<8} {rate:7.0f} samples a {'CPU ' if task.cpu else ''}second, {rest}")
    ratio = statistics.median(ours.rate / theirs.rate for theirs, ours in rounds)
    print(f"  ratio    {ratio:7.2f}  (target: {task.setting.target})", flush=True)


def measured(task: Task, iterations: int, run: Callable[[int], Outcome]) -> Outcome:
    """A run of so many iterations; with ``cpu``, its rate is by the CPU seconds that the later ones cost."""
    whole = run(iterations)
    if not task.cpu:
        return whole
    return replace(whole, rate=SAMPLES * (iterations - WARMUP) / (whole.cpu - run(WARMUP).cpu))


def start(name: str, folder: Path) -> tuple[Path, Path]:
    """The model that both sides start from, after SFT, and the questions; made where they are not there."""
    model, data = folder / "run/models/policy", folder / "files/train.parquet"
    if not model.is_dir():
        (make if name == "short" else make_ragged)(folder / "files")
        graph = {"short": "demo_sft", "ragged": str(SIDE / "ragged_sft.yaml")}[name]
        settings = {"models.policy.path": folder / "files/model", "examples.files": f"[{data}]"}
        if name == "short":
            settings["eval.nodes.prompts.files"] = f"[{folder / 'files/test.parquet'}]"
        train(graph, settings, folder / "run", "", [])
    return model, data


def make_ragged(folder: Path) -> None:
    """The demo's model with room for longer answers, and questions ``d*n=`` whose answer is n times d."""
    make_model(folder / "model", seed=0)
    file = folder / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 128}))
    rows = [{"question": f"{d}*{n}=", "answer": str(d) * n} for d in range(10) for n in range(1, 61)]
    random.Random(0).shuffle(rows)
    write_parquet(folder / "train.parquet", rows)


def tune(task: Task) -> tuple[dict[str, Any], str]:
    """The options with which TRL is fastest, and the allocator to load before it."""

    def rate(chosen: Mapping[str, Any], preload: str = "") -> float:
        return measured(task, 2 * WARMUP, lambda n: trl(task, n, 0, chosen, preload)).rate

    chosen: dict[str, Any] = {}
    threads = {} if task.cpu else {"threads": sorted({1, task.threads})}  # fewer where others use the cores
    for option, values in {**CHOICES, **threads}.items():
        rates = {value: rate({**chosen, option: value}) for value in values}
        chosen[option] = max(rates, key=rates.__getitem__)
    found = [file for name in ALLOCATORS for file in sorted(glob.glob(f"/usr/lib/*/{name}"))]
    return chosen, max(["", *found], key=lambda preload: rate(chosen, preload))


def trl(task: Task, iterations: int, seed: int, chosen: Mapping[str, Any], preload: str) -> Outcome:
    """One run of ``trl_side/side.py``."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": task.model, "data": task.data, "out": folder, "reward": task.setting.reward}
        given |= {"max-new-tokens": task.setting.max_new_tokens, "iterations": iterations, "seed": seed}
        given |= {"threads": task.threads, **chosen}
        flags = [f"--{name}={value}" for name, value in given.items()]
        output, taken, cpu = spend([str(task.python), str(SIDE / "side.py"), *flags], preload, task.threads)
    found = json.loads(output.splitlines()[-1])
    return outcome(found["seconds"], found["rewards"], found["lengths"], taken, cpu)


def rlgraph(task: Task, iterations: int, seed: int, preload: str) -> Outcome:
    """One run of the graph of a setting."""
    settings = {"models.policy.path": task.model, "prompts.files": f"[{task.data}]", "seed": seed}
    settings["schedule.iterations"] = iterations
    where = ["--inline"] if task.cpu else ["--devices", str(task.devices)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        taken, cpu = train(str(SIDE / f"{task.name}.yaml"), settings, run, preload, where)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measures = ([line[key] for line in lines] for key in ("time/step", "reward/mean", "rollout/length"))
    return outcome(*measures, taken, cpu)


def train(
    graph: str, settings: Mapping[str, Any], run: Path, preload: str, more: list[str]
) -> tuple[float, float]:
    """``rlgraph run``, in a process of its own: its seconds and CPU seconds."""
    pairs = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "rlgraph", "run", graph, *pairs, "--run-dir", str(run), *more]
    _, taken, cpu = spend(command, preload, 1 if "--inline" in more else 0)
    return taken, cpu


def spend(command: list[str], preload: str, threads: int) -> tuple[str, float, float]:
    """Run a command with an allocator: what it says, its seconds, and its CPU seconds.

    With ``threads`` 0 the command chooses how many it uses.
    """
    more = {"LD_PRELOAD": preload} if preload else {}
    more |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout, taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def outcome(
    seconds: list[float], rewards: list[float], lengths: list[float], taken: float, cpu: float
) -> Outcome:
    """Of one run: seconds, mean reward and mean length of each iteration; the process's seconds."""
    counted = seconds[WARMUP:] or seconds
    reward, length = statistics.mean(rewards[-LAST:]), statistics.mean(lengths)
    return Outcome(SAMPLES * len(counted) / sum(counted), reward, length, taken - sum(seconds), cpu)


if __name__ == "__main__":
    main()
