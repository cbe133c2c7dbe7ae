"""What streaming saves, and where it saves nothing: two pools whose ops wait, so that two cores suffice.

    python benchmarks/streaming.py [--iterations 60]

Each iteration trains on 64 samples that 64 slots generate. Lengths are log-normal, the tail ten times the
median; or all alike. The bound is what the busiest pool needs for the tokens of an iteration, were all its
slots full: no schedule is faster. What is predicted is what the planner's simulator makes of the same lengths
and seconds, and of the prices of a round and of new weights, as measured in one of these runs. The first and
last iterations, in which pools fill and drain, are left out; with far fewer iterations than 60, processes for
rewards still start among those that count, and hold up the stream for a second or more each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import ray

from rlgraph.ir.actions import Sync
from rlgraph.reports.measured import between_rounds, read_metrics
from rlgraph.reports.plan_file import load
from rlgraph.runtime.demo import make
from rlgraph.runtime.run import run_graph
from rlgraph.streaming.rules import Window
from rlgraph.streaming.simulate import RegionWork, stream_course

GRAPH = Path(__file__).parent / "streaming.yaml"
BATCH, N, SLOTS, SECOND, TRAIN, MEDIAN = 16, 4, 64, 0.003, 0.36, 64
JUDGE, CHUNK = 0.3, 32
STREAMS = (0, 1, 2, 4, 8)
TARGETS = {"synchronous": 1.8, "one ahead": 1.25}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    count = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        make("demo_files")
        print(f"ray {ray.__version__}, {count} iterations")
        for tail in (10.0, 1.0):
            compare(tail, count)


def compare(tail: float, count: int) -> None:
    """Print the seconds of an iteration, of each schedule."""
    name = f"lengths up to {tail:g} x the median" if tail > 1 else "equal lengths"
    bound = max(TRAIN, work(tail, count) * SECOND / SLOTS)
    print(f"\n{name}: bound {bound:.3f} s an iteration")
    schedules = {"synchronous": "{}", "one ahead": "{buffer: {staleness: 1, by: batch}}"}
    schedules |= {
        f"stream, staleness {k}": f"{{buffer: {{staleness: {k}, chunk: {CHUNK}}}}}" for k in STREAMS
    }
    last = f"stream, staleness {STREAMS[-1]}"
    took = {name: measure(tail, count, name, schedule) for name, schedule in schedules.items()}
    gap, sync = prices(folder(last, tail))
    predicted = {f"stream, staleness {k}": simulated(tail, count, k, gap, sync) for k in STREAMS}
    print(f"  {gap * 1000:.1f} ms between two rounds, {sync * 1000:.1f} ms for new weights")
    for name, (seconds, age) in took.items():
        off = f"{seconds / predicted[name] - 1:+.1%}" if name in predicted else ""
        told = f"  predicted {predicted[name]:.3f} s, off by {off}" if off else ""
        print(f"  {name:<22} {seconds:6.3f} s  {seconds / bound:5.2f} of the bound  age {age:.2f}{told}")
    for name, target in TARGETS.items():
        aim = f"  (target {target})" if tail > 1 else ""
        print(f"  {name} / {last}: {took[name][0] / took[last][0]:.2f}{aim}")


def lengths(tail: float, count: int) -> list[float]:
    """Return the tokens of the samples of a run."""
    from streaming_ops import length

    return [float(length(prompt, k, MEDIAN, tail)) for prompt in range(BATCH * count) for k in range(N)]


def work(tail: float, count: int) -> float:
    """Return the mean tokens that an iteration trains on."""
    return sum(lengths(tail, count)) / count


def prices(run: Path) -> tuple[float, float]:
    """Return the median seconds between two rounds of a run, and of a sync."""
    plan, lines = load(run / "plan.json"), read_metrics(run)
    gaps = [gap for _, _, gap in between_rounds(run, plan)]
    syncs = [
        line[f"time/{step.node}"] for step in plan.steps if isinstance(step.action, Sync) for line in lines
    ]
    return statistics.median(gaps), statistics.median(syncs)


def simulated(tail: float, count: int, staleness: int, gap: float, sync: float) -> float:
    """Return what the planner's simulator makes of the iterations in the middle of the same run."""
    rounds = RegionWork(
        window=Window(rows=BATCH * N, group=N, staleness=staleness),
        lengths=lengths(tail, count),
        prompt=0.0,
        chunk=CHUNK,
        servers=1,
        slots=SLOTS,
        decode=lambda samples, context: SECOND,
        read=lambda samples, tokens: 0.0,
        measuring_on_pool=(gap, 0.0),
        measuring_elsewhere=(JUDGE, 0.0),
    )
    ends = [0.0, *stream_course(rounds, TRAIN, sync, count, end=count).syncs]
    return statistics.mean(middle([end - start for start, end in pairwise(ends)]))


def folder(name: str, tail: float) -> Path:
    """Return the folder of a run."""
    return Path(f"{name} {tail}".replace(" ", "-").replace(",", ""))


def measure(tail: float, count: int, name: str, schedule: str) -> tuple[float, float]:
    """Return the mean seconds of the iterations in the middle of a run, and the mean age of rows."""
    model = f"models.policy.path={Path('demo_files/model').resolve()}"
    more = f"iterations: {count}" + ", " * (schedule != "{}")
    settings = [model, f"drawn.tail={tail}", f"schedule={{{more}{schedule[1:]}"]
    settings += [f"drawn.seconds={SECOND}", f"judged.seconds={JUDGE}", f"update.seconds={TRAIN}"]
    run = run_graph(str(GRAPH), settings, run_dir=folder(name, tail))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.mean(middle([line["time/step"] for line in lines]))
    return seconds, statistics.mean(middle([line.get("finished/age", 0.0) for line in lines]))


def middle(iterations: Sequence[float]) -> Sequence[float]:
    """Return a run's iterations without those in which pools fill and drain."""
    return iterations[len(iterations) // 4 : -len(iterations) // 6]


if __name__ == "__main__":
    main()
