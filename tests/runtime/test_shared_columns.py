"""Columns in memory that the workers of a host share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.runtime.cluster.cluster import RayCluster
from rlgraph.runtime.cluster.sweeper import Sweeper
from rlgraph.runtime.columns.chunk import Chunk, gather, unpack
from rlgraph.runtime.columns.shared_memory import FOLDER, LEAST, MAPPED, SharedColumns, read, segments_of
from rlgraph.runtime.columns.store import Store
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.messages.errors import AwayError
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.messages.tasks import HOST, STORE, ColumnRef, Segment, Task
from rlgraph.runtime.worker.worker import Worker

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no /dev/shm here")
ONES = str(Path(__file__).parent / "ones.yaml")
OFFSETS = np.array([0, LEAST])
SESSION = f"rlgraph-test-{os.getpid()}"
OTHER = f"""
import sys
import numpy as np
from rlgraph.runtime.columns.shared_memory import SharedColumns
columns = SharedColumns("{SESSION}")
print(columns.put("seven", np.arange(7, dtype=np.float32), np.array([0, 3, 7])).name, flush=True)
sys.stdin.read()
"""


def ragged(*lengths: int, first: float = 0.0) -> Chunk:
    values = first + np.arange(sum(lengths), dtype=np.float32)
    return Chunk(values, np.cumsum([0, *lengths]))


def same(one: Chunk, other: Chunk) -> bool:
    return one.values.tolist() == other.values.tolist() and one.offsets.tolist() == other.offsets.tolist()


def left() -> list[str]:
    """Names of the segments that are there."""
    return sorted(path.name for path in FOLDER.glob(f"{SESSION}-*"))


def gone() -> bool:
    """Wait until no segment is there, for a while."""
    end = time.monotonic() + 120
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    return not left()


@pytest.fixture
def shared() -> Iterator[SharedColumns]:
    columns = SharedColumns(SESSION)
    yield columns
    columns.close()
    assert not left()


@pytest.mark.parametrize("longest", [1, 5, 2000])
@pytest.mark.parametrize("away", [{0}, {1, 2}, {0, 1, 2}])
def test_rows_are_the_same_wherever_their_parts_lie(
    shared: SharedColumns, longest: int, away: set[int]
) -> None:
    def mapped(name: str, part: Chunk) -> Chunk:
        segment = shared.put(name, part.values, part.offsets)
        assert segment
        return Chunk(read(name, segment), segment.offsets)

    random = np.random.default_rng(longest)
    parts = [ragged(*random.integers(1, longest + 1, 700), first=1e4 * at) for at in range(3)]
    mixed = [mapped(str(at), part) if at in away else part for at, part in enumerate(parts)]
    for rows in (random.integers(0, 2100, 3000), np.arange(2100), np.array([], np.int64)):
        assert same(gather(mixed, rows), gather(parts, rows))
    assert same(gather(mixed[:1], np.arange(0, 700, 3)), gather(parts[:1], np.arange(0, 700, 3)))
    assert all(same(one, part) for one, part in zip(mixed, parts, strict=True))


def test_what_is_read_cannot_be_written(shared: SharedColumns) -> None:
    segment = shared.put("column", np.arange(5), np.array([0, 5]))
    assert segment
    with pytest.raises(ValueError, match="read-only"):
        read("column", segment)[0] = 1


def test_a_segment_is_used_again_once_nobody_reads_it(shared: SharedColumns) -> None:
    def put(name: str, count: int) -> Segment:
        segment = shared.put(name, np.full(count, count), np.array([0, count]))
        assert segment
        return segment

    first, second = put("a", 10_000), put("b", 10_000)
    assert first.name != second.name
    shared.drop("a")
    again = put("c", 11_000)  # a little longer: there is room
    assert again.name == first.name and read("c", again).tolist() == [11_000] * 11_000
    shared.drop("c")
    longer = put("d", 30_000)
    assert left() == sorted([second.name, longer.name])
    assert read("d", longer).tolist() == [30_000] * 30_000
    assert first.name not in MAPPED and read("b", second)[0] == 10_000


def test_a_task_reads_a_column_where_it_lies_and_copies_none_of_it() -> None:
    store, (ref,) = shared_part()
    task = Task("run", (), (ColumnRef("part", 0),))
    (part,) = store.arguments(task, [ref])
    lies = np.frombuffer(MAPPED[ref.location.name], np.uint8)
    assert np.shares_memory(unpack(part).values.numpy(), lies)
    del part
    store.settle()
    store.drop(["part"])
    assert [segment.name for segment in store.shared.free] == [ref.location.name]
    store.close()
    assert not left()


def test_what_an_op_still_holds_when_it_is_over_stays_as_it_is() -> None:
    store, (ref,) = shared_part()
    (part,) = store.arguments(Task("run", (), (ColumnRef("part", 0),)), [ref])
    held = unpack(part).values[10:20]
    del part
    store.settle()
    store.drop(["part"])
    assert not store.shared.free and not left()
    store.put(
        Task("run", (), outputs=(ColumnRef("next", HOST),)), [Chunk(np.ones(LEAST, np.float32), OFFSETS)]
    )
    assert held.tolist() == list(range(10, 20))
    store.close()


def shared_part() -> tuple[Store, list[Any]]:
    """A store that has shared a part of numbers from 0 on, and the part's reference."""
    store = Store(SESSION)
    part = Chunk(np.arange(LEAST, dtype=np.float32), OFFSETS)
    return store, store.put(Task("run", (), outputs=(ColumnRef("part", HOST),)), [part])


def test_what_is_short_or_has_no_token_axis_is_not_shared() -> None:
    long = Chunk(np.zeros(LEAST, np.uint8), np.array([0, LEAST]))
    store, task = Store(SESSION), Task("run", (), outputs=(ColumnRef("part", HOST),))
    (ref,) = store.put(task, [long])
    assert isinstance(ref, ColumnRef) and len(left()) == 1
    for part in (Chunk(long.values[:-1], np.array([0, LEAST - 1])), Chunk(long.values), Chunk(["a"])):
        assert store.put(task, [part])[0] is part
    store.close()
    assert not left()


def test_where_there_is_no_room_a_column_goes_through_the_store_and_a_note_says_so() -> None:
    store, task = Store(SESSION), Task("run", (), outputs=(ColumnRef("part", HOST),))
    count = 2**43  # no machine has as much
    vast = Chunk(np.broadcast_to(np.float32(0), (count,)), np.array([0, count]))
    assert not store.notes()
    assert store.put(task, [vast])[0] is vast and not left()
    assert "--shm-size" in store.notes()[0]
    small = Chunk(np.zeros(LEAST, np.uint8), np.array([0, LEAST]))
    assert isinstance(store.put(task, [small])[0], ColumnRef)
    store.close()


def test_of_a_process_that_is_killed_nothing_is_left() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    segment = Segment(process.stdout.readline().strip(), "<f4", (7,), np.array([0, 3, 7]))
    assert read("seven", segment).tolist() == list(range(7))
    part = Chunk(read("seven", segment), segment.offsets)
    assert gather([part], [1, 0]).values.tolist() == [3, 4, 5, 6, 0, 1, 2]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gone()
    assert part.values.tolist() == list(range(7))  # what was mapped stays
    MAPPED.clear()
    with pytest.raises(AwayError, match="the column seven can't be read in shared memory"):
        read("seven", segment)


def test_workers_find_out_whether_they_can_read_each_other() -> None:
    worker = Worker(session=SESSION)
    ref, number = worker.offer()
    assert ref and worker.can_read([(ref, number), (ref, number)])
    assert not worker.can_read([(ref, number), (None, number)])
    assert not worker.can_read([(ref, number + 1)])
    elsewhere = ColumnRef("sample", Segment("rlgraph-of-another-host", "<i8", (1,), np.arange(2)))
    assert not worker.can_read([(elsewhere, number)])
    worker.close()
    assert not left()


def test_a_worker_reads_what_it_shares_itself() -> None:
    worker, part = Worker(session=SESSION), ragged(LEAST)
    made = Task("repeat", (2,), (ColumnRef("given", 0),), outputs=(ColumnRef("twice", HOST),))
    _, returned = worker.perform([made], (), part)
    assert isinstance(returned, ColumnRef) and not worker.store.resident
    taken = Task("select", ([1],), (ColumnRef("twice", 0),), outputs=(ColumnRef("", STORE),))
    assert same(worker.perform([taken], (), returned)[1], part)
    worker.perform([], ["twice", "never shared"])
    assert not worker.store.shared.used and len(worker.store.shared.free) == 1
    worker.close()
    assert not left()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_workers_of_a_cluster_read_each_other_and_leave_nothing(tmp_path: Path, killed: bool) -> None:
    cluster = RayCluster({"main": 2}, gpus=False, address=None, logs=tmp_path, timeout=300)
    parts = [ragged(*[300] * 1000), ragged(*[400] * 1000, first=0.5)]
    order = np.random.default_rng(0).permutation(2000)
    try:
        assert cluster.shares
        made = Task("repeat", (1,), (ColumnRef("part", 0),), outputs=(ColumnRef("column", HOST),))
        refs = [
            cluster.call(place, "perform", [made], (), part, returns=2)[1]
            for place, part in zip(cluster.places, parts, strict=True)
        ]
        found = cluster.get(refs)
        assert all(isinstance(one, ColumnRef) for one in found)
        assert len({one.location.name for one in found}) == 2
        both = (ColumnRef("column", 0), ColumnRef("column", 1))
        gathered = Task("repartition", ([order], [2]), both, outputs=(ColumnRef("", STORE),))
        for place in cluster.places:
            returned = cluster.call(place, "perform", [gathered], (), *refs, returns=2)[1]
            assert same(*cluster.get([returned]), gather(parts, order))
        assert len([*FOLDER.glob(f"{cluster.session}-*")]) == 4  # a sample and a column of each
        if killed:
            cluster.ray.kill(cluster.workers[cluster.places[0]])
    finally:
        cluster.close()
    assert not [*FOLDER.glob(f"{cluster.session}-*")]


DRIVER = f"""
import os
import signal
from rlgraph.runtime.cluster.sweeper import Sweeper
sweeper = Sweeper("{SESSION}", "{segments_of(SESSION)}", "")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_driver_unlinks_what_is_left() -> None:
    columns, sweeper = SharedColumns(SESSION), Sweeper(SESSION, segments_of(SESSION), "")
    assert columns.put("column", np.arange(5), np.array([0, 5])) and left()
    servers_own = Path(tempfile.mkdtemp(prefix=f"{os.environ['RLGRAPH_SESSION']}-"))
    sweeper.close()
    assert not left() and not servers_own.exists()
    columns.close()


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing() -> None:
    columns = SharedColumns(SESSION)
    assert columns.put("column", np.arange(5), np.array([0, 5]))
    done = subprocess.run([sys.executable, "-c", DRIVER])
    assert done.returncode == -signal.SIGKILL
    assert gone()
    assert columns.put("later", np.arange(5), np.array([0, 5]))  # by a worker that ends after its driver
    assert gone()
    columns.close()


def test_what_everybody_left_who_was_killed_is_unlinked_by_the_next_worker() -> None:
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, start_new_session=True) as other:
        assert other.stdout
        name = other.stdout.readline().strip()
        SharedColumns("rlgraph-later").close()
        assert left() == [name], "its worker runs"
        os.killpg(other.pid, signal.SIGKILL)  # with Python's resource tracker, as Ray does
    assert left() == [name]
    SharedColumns("rlgraph-later").close()
    assert not left()


def test_what_ends_with_a_driver_are_the_programs_of_ray_that_it_started(tmp_path: Path) -> None:
    """And not a process whose program names Ray's folder, as one does from which Python forks."""
    script = tmp_path / "ray" / "agent.py"
    script.parent.mkdir()
    script.write_text("input()")
    sweeper = Sweeper(SESSION, segments_of(SESSION), "")  # in the environment of both
    named = subprocess.Popen([sys.executable, "-c", f"input({str(script)!r})"], stdin=PIPE)
    agent = subprocess.Popen([sys.executable, str(script)], stdin=PIPE)
    sweeper.close()
    assert agent.wait() == -signal.SIGKILL
    assert named.poll() is None
    for process in (agent, named):
        process.communicate()


def test_what_is_shared_is_over_when_its_last_reader_has_reported(
    demo_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    plan = compile_graph(ONES, (), 2)
    execution = Execution(plan, "train", Entry(0, dict.fromkeys(plan.models, 0)), {})
    made = [ref for step in execution.steps for ref in execution.ref_table.destinations(step, HOST)]
    shares = {ref.name for ref in made if ref.location == HOST}
    assert shares
    over: list[tuple[str, Any]] = []
    for step in execution.steps:
        column_of = {execution.ref_table.name(column) for column in (*step.reads, *step.writes)}
        *rest, last = [(step.pool, device) for device in step.devices]
        for place in rest:
            assert not execution.reported(step, place, Report(0.0, 0.0))
        found = execution.reported(step, last, Report(0.0, 0.0))
        assert {name for name, _ in found} <= column_of
        over += found
    assert {name for name, _ in over} == shares
    assert len(over) == len({*over}) == 2 * len(shares)  # of both devices, once
