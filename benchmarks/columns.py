"""How do columns travel? One iteration of the shape of PPO, on four workers, with 1 GiB of columns.

    python benchmarks/columns.py [--mib 1024] [--iterations 7]

The ops compute nothing, they read every page of what they are given: an iteration is the columns' way from
the op that writes them, over the moves from layout to layout, to those that read them. The bound in the same
run is four processes that copy into shared memory what the plan's ops read, each byte once a reader: as many
bytes as the ops write, to a place of its own for each reader. Both reuse memory that they have touched
before, and weights are synced as in any iteration. What passes through the driver is what it pickles for a
call and what it gets back, counted before anything is timed. The rows are those of graphs/ppo.yaml, 128
prompts x 4 samples, and as long as ``--mib`` makes them. The workers need about three times that, the bound
four times.
"""

from __future__ import annotations

import argparse
import io
import mmap
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy
import ray
from ray import cloudpickle

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.demo import make
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.messages.tasks import Place
from rlgraph.runtime.segments import State, stretch

TARGET, TARGET_BYTES, WORKERS, ROWS, WARMUP = 1.3, 2**20, 4, 512, 8
SIZES = {"int64": 8, "float32": 4, "boolean": 1}  # bytes a token
REFERENCE = 256  # bytes of a reference as it is pickled, with its owner's address, rounded up
GRAPH = Path(__file__).parent / "columns.yaml"


class Counted(RayCluster):
    """Counts the bytes of what the driver hands over and of what it gets, as long as it is told to."""

    moved, counts = 0, True

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        self.moved += pickled(args) if self.counts else 0
        return super().call(place, method, *args, returns=returns)

    def get(self, references: Any) -> list[Any]:
        found = super().get(references)
        self.moved += pickled(found) if self.counts else 0
        return found


class Counting(cloudpickle.Pickler):
    """Counts references, and leaves them out: one that is pickled is kept by Ray until the end."""

    references = 0

    def persistent_id(self, value: Any) -> Any:
        found = isinstance(value, ray.ObjectRef)
        self.references += found
        return 0 if found else None


def pickled(value: Any) -> int:
    """Bytes of a value as it is sent."""
    buffer = io.BytesIO()
    counting = Counting(buffer)
    counting.dump(value)
    return buffer.tell() + counting.references * REFERENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="of columns, not counting copies")
    parser.add_argument("--iterations", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        models = [f"models.{name}.path={folder}/model" for name in ("policy", "critic")]
        written, _ = per_token(compile_graph(str(GRAPH), [*models, "rollout.tokens=1"], devices=WORKERS))
        length = options.mib * 2**20 // written // ROWS
        plan = compile_graph(str(GRAPH), [*models, f"rollout.tokens={length}"], devices=WORKERS)
        rounds = options.iterations + WARMUP
        copiers = Copiers(*(size * length * ROWS for size in per_token(plan)), rounds)  # forks: before Ray
        cluster = Counted(plan.pools, gpus=False, address=None, logs=Path(folder), timeout=600)
        try:
            measure(plan, cluster, copiers, length, rounds)
        finally:
            cluster.close()


def per_token(plan: Plan) -> tuple[int, int]:
    """Bytes a token that ops write, and that ops read: a column counts once for each op that reads it."""
    types = {name: column.type for name, column in plan.columns["train"].items()}
    sizes = {name: SIZES[kind.partition("[")[0]] for name, kind in types.items() if "tokens]" in kind}
    ops = [step for step in plan.steps if not step.inserted]
    written = sum(sizes.get(name, 0) for op in ops for name in op.writes)
    return written, sum(sizes.get(name, 0) for op in ops for name in op.reads)


def measure(plan: Plan, cluster: Counted, copiers: Copiers, length: int, rounds: int) -> None:
    """Iterations and copies in turn, so that a drift of the machine meets both."""
    first = cluster.places[0]
    (place,), (port,) = (cluster.get(cluster.call(first, name)) for name in ("place", "free_port"))
    meeting = f"tcp://{place[1]}:{port}"
    cluster.get([cluster.call(place, "setup", plan, meeting, *place)[0] for place in cluster.places])
    driver = Driver(plan, cluster, lambda step: None)
    written, read = (size * length * ROWS for size in per_token(plan))
    ours, bound, moved = [], [], []
    state, start = State(versions=dict.fromkeys(plan.models, 0)), time.perf_counter()
    for _ in stretch(plan, driver, state, rounds, [], lambda iteration: frozenset()):
        ours.append(time.perf_counter() - start)
        moved.append(cluster.moved)
        bound.append(copiers.seconds())
        cluster.counts = len(ours) < WARMUP  # it takes time of its own
        cluster.moved, start = 0, time.perf_counter()
    mine, floor = (statistics.median(times[WARMUP:]) for times in (ours, bound))
    print(f"ray {ray.__version__}, {WORKERS} workers, {ROWS} samples of {length:,} tokens on average")
    print(f"  columns written        {written / 2**20:8.0f} MiB, read by ops {read / 2**20:.0f} MiB")
    print(f"  through the driver     {max(moved) / 2**10:8.0f} KiB  (target: under {TARGET_BYTES >> 10})")
    print(f"  an iteration           {mine:8.2f} s")
    print(f"  a copy for each reader {floor:8.2f} s")
    print(f"  ratio                  {mine / floor:8.2f}  (target: at most {TARGET})")


class Copiers:
    """As many processes as workers, which copy ``written`` bytes to ``read`` bytes of shared memory."""

    def __init__(self, written: int, read: int, times: int) -> None:
        context = multiprocessing.get_context("fork")
        self.ready, self.done = context.Barrier(WORKERS + 1), context.Barrier(WORKERS + 1)
        for _ in range(WORKERS):
            arguments = (written // WORKERS, read // WORKERS, times, self.ready, self.done)
            context.Process(target=copy, args=arguments, daemon=True).start()

    def seconds(self) -> float:
        """Seconds until all have copied their share once."""
        self.ready.wait()
        start = time.perf_counter()
        self.done.wait()
        return time.perf_counter() - start


def copy(written: int, read: int, times: int, ready: Barrier, done: Barrier) -> None:
    """Copy ``written`` bytes over and over to ``read`` bytes of shared memory; all that ``times`` times."""
    source = numpy.ones(written, numpy.uint8)
    target = numpy.frombuffer(mmap.mmap(-1, read), numpy.uint8)  # anonymous and shared: shared memory
    target[:] = 1
    for _ in range(times):
        ready.wait()
        for start in range(0, read, written):
            count = min(written, read - start)
            target[start : start + count] = source[:count]
        done.wait()


if __name__ == "__main__":
    main()
