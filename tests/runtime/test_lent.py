"""Columns that others read in the memory of the worker that made them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.runtime import lent as module
from rlgraph.runtime.cluster import RayCluster
from rlgraph.runtime.columns import Part, gather, take, whole
from rlgraph.runtime.lent import LEAST, AwayError, Lent, lend, may_be_read
from rlgraph.runtime.shelf import Shelf
from rlgraph.runtime.tasks import Here, Sent, Task
from rlgraph.runtime.walk import Entry, Walk
from rlgraph.runtime.worker import Report, Worker

pytestmark = pytest.mark.skipif(not may_be_read(), reason="no process_vm_readv here")
ONES = str(Path(__file__).parent / "ones.yaml")
OTHER = """
import sys
import numpy as np
from rlgraph.runtime.lent import lend, may_be_read
assert may_be_read()
values = np.arange(7, dtype=np.float32)
print(lend("seven", values, np.array([0, 3, 7])).address, flush=True)
sys.stdin.read()
"""


def ragged(*lengths: int, first: float = 0.0) -> Part:
    values = first + np.arange(sum(lengths), dtype=np.float32)
    return Part(values, np.cumsum([0, *lengths]))


def lend_all(part: Part) -> Lent:
    return lend("part", part.values, part.offsets)


def same(one: Part, other: Part) -> bool:
    return one.values.tolist() == other.values.tolist() and one.offsets.tolist() == other.offsets.tolist()


@pytest.mark.parametrize("longest", [1, 5, 2000])
@pytest.mark.parametrize("away", [{0}, {1, 2}, {0, 1, 2}])
def test_rows_are_the_same_wherever_their_parts_lie(longest: int, away: set[int]) -> None:
    random = np.random.default_rng(longest)
    parts = [ragged(*random.integers(0, longest + 1, 700), first=1e4 * at) for at in range(3)]
    mixed = [lend_all(part) if at in away else part for at, part in enumerate(parts)]
    for rows in (random.integers(0, 2100, 3000), np.arange(2100), np.array([], np.int64)):
        assert same(gather(mixed, rows), gather(parts, rows))
    assert same(take(lend_all(parts[0]), np.arange(0, 700, 3)), take(parts[0], np.arange(0, 700, 3)))
    assert same(whole(lend_all(parts[1])), parts[1]) and whole(parts[1]) is parts[1]
    assert len(lend_all(parts[2])) == 700
    assert lend_all(parts[2]).lengths.tolist() == parts[2].lengths.tolist()


def test_more_bytes_than_fit_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES", 4 * 50)
    part = ragged(*[40] * 30)
    assert same(take(lend_all(part), np.arange(29, -1, -1)), take(part, np.arange(29, -1, -1)))


def test_what_is_short_or_has_no_token_axis_is_not_lent() -> None:
    long = Part(np.zeros(LEAST, np.uint8), np.array([0, LEAST]))
    shelf, task = Shelf(), Task("run", (), keeps=("",), lends=("part",))
    assert isinstance(shelf.put(task, [long])[0], Lent) and shelf.parts == {"part": long}
    shelf.drop(["part"])
    for part in (Part(long.values[:-1], np.array([0, LEAST - 1])), Part(long.values), Part(["a"])):
        assert shelf.put(task, [part])[0] is part and not shelf.parts


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Lent]]:
    """Another process, and seven numbers of its memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    address = int(process.stdout.readline())
    yield process, Lent(process.pid, "seven", address, "<f4", 7, np.array([0, 3, 7]))
    process.kill()
    process.communicate()


def test_another_process_s_memory_until_it_is_gone(other: tuple[subprocess.Popen[str], Lent]) -> None:
    process, part = other
    assert whole(part).values.tolist() == list(range(7))
    assert take(part, [1, 0]).values.tolist() == [3, 4, 5, 6, 0, 1, 2]
    process.kill()
    process.wait()
    with pytest.raises(AwayError, match=f"the column seven in process {process.pid} can't be read: No such"):
        whole(part)


def test_workers_find_out_whether_they_can_read_each_other() -> None:
    worker = Worker()
    offer = worker.offer()
    assert offer and worker.can_read([offer, offer])
    assert not worker.can_read([offer, None])
    part, number = offer
    assert not worker.can_read([offer, (part, number + 1)])  # a process of the same number on another host
    assert not worker.can_read([(replace(part, address=8), number)])


def test_a_worker_reads_what_it_lent_itself_where_it_is() -> None:
    worker, part = Worker(), ragged(LEAST)
    made = Task("repeat", (2,), (Sent(0),), keeps=("",), lends=("twice",))
    _, returned = worker.perform([made], (), part)
    assert isinstance(returned, Lent) and returned.process == os.getpid()
    worker.shelf.parts["twice"] = ragged(3)
    read = Task("select", ([0],), (Sent(0),), keeps=("",), lends=("",))
    assert same(worker.perform([read], (), returned)[1], ragged(3))
    worker.perform([], ["twice", "never lent"])
    assert not worker.shelf.parts


def test_workers_of_a_cluster_read_each_other(tmp_path: Path) -> None:
    cluster = RayCluster({"main": 2}, gpus=False, address=None, logs=tmp_path, timeout=60)
    parts = [ragged(*[300] * 1000), ragged(*[400] * 1000, first=0.5)]
    order = np.random.default_rng(0).permutation(2000)
    try:
        assert cluster.lends
        made = Task("repeat", (1,), (Sent(0),), keeps=("",), lends=("column",))
        refs = [
            cluster.call(place, "perform", [made], (), part, returns=2)[1]
            for place, part in zip(cluster.places, parts, strict=True)
        ]
        found = cluster.get(refs)
        assert all(isinstance(one, Lent) for one in found) and found[0].process != found[1].process
        read = Task("repartition", ([order], [2]), (Sent(0), Sent(1)), keeps=("",), lends=("",))
        for place in cluster.places:
            returned = cluster.call(place, "perform", [read], (), *refs, returns=2)[1]
            assert same(*cluster.get([returned]), gather(parts, order))
        kept = Task("select", ([0],), (Here("column"),), keeps=("",), lends=("",))
        first = cluster.places[0]
        cluster.get(cluster.call(first, "perform", [kept], (), returns=2))
        cluster.get(cluster.call(first, "perform", [], ["column"]))
        with pytest.raises(KeyError, match="column"):
            cluster.get(cluster.call(first, "perform", [kept], (), returns=2)[:1])
    finally:
        cluster.close()


def test_what_was_lent_is_over_when_its_last_reader_has_reported(
    demo_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    plan = compile_graph(ONES, (), 2)
    walk = Walk(plan, "train", Entry(0, dict.fromkeys(plan.models, 0)), {})
    lends = {name for step in walk.steps for name in walk.lends(step)} - {""}
    assert lends
    over: list[tuple[str, Any]] = []
    for step in walk.steps:
        column_of = {walk._name(column) for column in (*step.reads, *step.writes)}
        *rest, last = [(step.pool, device) for device in step.devices]
        for place in rest:
            assert not walk.reported(step, place, Report(0.0, 0.0))
        found = walk.reported(step, last, Report(0.0, 0.0))
        assert {name for name, _ in found} <= column_of
        over += found
    assert {name for name, _ in over} == lends
    assert len(over) == len({*over}) == 2 * len(lends)  # of both devices, once
