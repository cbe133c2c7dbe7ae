"""What generating one iteration ahead saves: two pools whose ops wait, so that two cores suffice.

    python benchmarks/overlap.py [--iterations 20]

Generation and training take equally long, so one iteration ahead both pools are busy all the time but for
the first and the last slot: of n iterations, n + 1 halves against 2n. Also checked: each pool ran its
steps in the order that the plan says.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray

from rlgraph.planning.simulate import slot_steps
from rlgraph.reports.plan_file import parse
from rlgraph.runtime.demo import make
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.segments import lead

TARGET = 0.65
GRAPH = Path(__file__).parent / "overlap.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=20)
    count = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make("demo_files")
        seconds = [measure(staleness, count) for staleness in (0, 1)]
    print(f"ray {ray.__version__}, {count} iterations, generation and training of 0.25 s each")
    print(f"  in turn       {seconds[0]:6.2f} s")
    print(f"  one ahead     {seconds[1]:6.2f} s")
    print(f"  ratio         {seconds[1] / seconds[0]:6.2f}  (target: at most {TARGET})")


def measure(staleness: int, count: int) -> float:
    """Seconds of all iterations of a run."""
    model = f"models.policy.path={Path('demo_files/model').resolve()}"
    buffer = f"{{staleness: {staleness}, by: batch}}"
    settings = [model, f"schedule={{iterations: {count}, buffer: {buffer}}}"]
    run = run_graph(str(GRAPH), settings, run_dir=Path(f"staleness-{staleness}"))
    check_order(run, count)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(sum(line["time/step"] for line in lines))


def check_order(run: Path, count: int) -> None:
    """That each pool ran what the plan says, in its order."""
    plan = parse((run / "plan.json").read_text())
    planned = [pair for slot in range(-lead(plan), count) for pair in slot_steps(plan, slot, 0, count)]
    for pool in plan.pools:
        expected = [(i + 1, step.id) for i, step in planned if pool in (step.pool, step.source)]
        assert measured(run, pool) == expected, f"pool {pool} ran in another order than planned"
        print(f"{run}: {len(expected)} steps on {pool} ran in the plan's order")


def measured(run: Path, pool: str) -> list[tuple[int, int]]:
    """Iteration and step of what ran on a pool's first device, by when it started."""
    events: list[dict[str, Any]] = json.loads((run / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    own = [event for event in events if (event["pid"], event["tid"]) == (pool, 0)]
    return [(e["args"]["iteration"], e["args"]["step"]) for e in sorted(own, key=lambda e: e["ts"])]


if __name__ == "__main__":
    main()
