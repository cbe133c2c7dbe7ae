"""What an iteration costs beside its ops: a plan whose ops do nothing, on two Ray workers.

    python benchmarks/orchestration.py [--iterations 200]

The bound in the same run is bare Ray: as many actor calls, each given the result of the one before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import ray

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.columns.chunk import Chunk
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution

TARGET_MS = 50
GRAPH = """
graph: idle
nodes:
  number:   {op: "idle_ops.py:source", batch: 32}
  spread:   {op: "idle_ops.py:spread", n: 8}
  rewards:  {op: "idle_ops.py:each"}
  second:   {op: "idle_ops.py:each", in: {scores: rewards}}
  third:    {op: "idle_ops.py:each", in: {scores: second}}
  grouped:  {op: "idle_ops.py:group", in: {scores: third}}
  whole:    {op: "idle_ops.py:whole", in: {scores: grouped}}
  fourth:   {op: "idle_ops.py:each", in: {scores: whole}}
  fifth:    {op: "idle_ops.py:group", in: {scores: fourth}}
  sixth:    {op: "idle_ops.py:each", in: {scores: fifth}}
schedule: {iterations: 1}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=200)
    count = parser.parse_args().iterations
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idle.yaml"
        path.write_text(GRAPH.replace("idle_ops.py", str(here / "idle_ops.py")))
        plan = compile_graph(str(path), devices=2)
        cluster = RayCluster(plan.pools, gpus=False, address=None, logs=Path(folder), timeout=600)
        try:
            measure(plan, cluster, count)
        finally:
            cluster.close()


def measure(plan: Plan, cluster: RayCluster, count: int) -> None:
    """Iterations and bare calls in turn, so that a drift of the machine meets both."""
    first = cluster.places[0]
    (place,), (port,) = (cluster.get(cluster.call(first, name)) for name in ("place", "free_port"))
    meeting = f"tcp://{place[1]}:{port}"
    cluster.get([cluster.call(place, "setup", plan, meeting, *place)[0] for place in cluster.places])
    driver = Driver(plan, cluster, lambda step: None)
    ours, bare = [], []
    for _ in range(count + 10):
        ours.append(seconds(lambda: iteration(plan, driver)))
        bare.append(seconds(lambda: calls(plan, cluster)))
    mine, floor = (1e3 * statistics.median(times[10:]) for times in (ours, bare))
    print(f"ray {ray.__version__}, {len(plan.steps)} steps per iteration, 2 workers, median of {count}")
    print(f"  an iteration of idle ops   {mine:6.1f} ms  (target: under {TARGET_MS} ms)")
    print(f"  the same calls of bare Ray {floor:6.1f} ms")
    print(f"  ratio                      {mine / floor:6.2f}")


def iteration(plan: Plan, driver: Driver) -> None:
    execution = Execution(plan, "train", Entry(0, {}), positions={})
    driver.submit((execution, step) for step in plan.steps)
    driver.finish(execution)


def calls(plan: Plan, cluster: RayCluster) -> None:
    """A call for each device of each step, the results of one step the arguments of the next."""
    carried: list[Any] = [Chunk(numpy.zeros(1, numpy.float32))] * 2
    for step in plan.steps:
        for device in step.devices:
            _, carried[device] = cluster.call((step.pool, device), "repeat", 1, carried[device], returns=2)
    cluster.get(carried)


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
