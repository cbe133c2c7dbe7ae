"""A worker of a pool that streams is stopped most of the time: it gets fewer rows, and all rows come."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_stream import GRAPH, check, run

pytestmark = pytest.mark.usefixtures("in_demo", "workers")
OPS = Path(__file__).parent / "stream_ops.py"
STOPPED, RUNS = 0.045, 0.005  # seconds in turns


@contextmanager
def slowed(note: Path) -> Iterator[None]:
    """Stop the process that has written the first line of a file nine tenths of the time."""
    over = threading.Event()

    def stop() -> None:
        with suppress(ProcessLookupError):  # the run is over
            while not over.wait(RUNS):
                if lines := rounds(note):
                    os.kill(lines[0]["process"], signal.SIGSTOP)
                    over.wait(STOPPED)
                    os.kill(lines[0]["process"], signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rounds(note: Path) -> list[dict[str, Any]]:
    text = note.read_text() if note.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fifo", "in_order"])
def test_a_slow_worker_gets_fewer_rows_where_their_order_is_free(order: str) -> None:
    note = Path("rounds.jsonl").resolve()
    drawn = f"op: '{OPS}:draw_by_token', model: policy, n: 2, longest: 40, note: '{note}'"
    text = f"graph: slow\nextends: {GRAPH}\nedits:\n  - replace: {{drawn: {{{drawn}}}}}\n"
    Path("slow.yaml").write_text(text)
    stream = f"{{staleness: 3, chunk: 6, order: {order}}}"
    pools = "pools={train: {devices: 1}, gen: {devices: 2}}"
    with slowed(note):
        iterations = run(
            "a", f"schedule={{iterations: 14, buffer: {stream}}}", pools, graph="slow.yaml", inline=False
        )
    check(iterations, 3)
    lines = rounds(note)
    slow, half = lines[0]["process"], lines[len(lines) // 2 :]
    its = sum(len(one["begun"]) for one in half if one["process"] == slow)
    others = sum(len(one["begun"]) for one in half) - its
    alarms = [*map(json.loads, Path("a/alarms.jsonl").read_text().splitlines())]
    assert any("`perf/speed/gen-" in alarm["law"] for alarm in alarms if alarm["rule"] == "worker-slow")
    if order == "in_order":
        assert abs(its - others) <= 2
        return
    assert 2 * its < others
    homes = {number: one["process"] for one in lines for number in one["begun"]}
    assert any(homes[number] == slow != one["process"] for one in lines for number in one["ended"])
    assert min(one["drawn"] for one in half if one["process"] == slow) < 6, "none ended with the other's"
