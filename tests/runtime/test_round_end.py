"""Rounds of a stream end where others wait for them, and late rewards hold none up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from test_stream import GRAPH, check, run

from rlgraph.runtime.driver.worker_shares import MIN_ROUNDS, WorkerShares
from rlgraph.runtime.worker.round_end import RoundEnd

OPS = Path(__file__).parent / "stream_ops.py"


def test_a_round_ends_where_weights_wait_and_where_another_worker_has_ended_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    train, *gen = (RoundEnd(store.clone(), pool) for pool in ("train", "gen", "gen"))
    first, second = (one.begin("drawn") for one in gen)
    assert not first() and not second()
    train.sends("gen")
    assert first() and second()
    gen[0].receives()
    assert not first() and second()
    gen[1].receives()
    gen[0].end("drawn")
    assert second()
    assert not gen[1].begin("drawn")(), "the next round goes on"
    assert not RoundEnd(None, "gen").begin("drawn")()


def test_a_worker_ends_its_round_where_the_store_is_gone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    end = RoundEnd(store.clone(), "gen")
    is_due = end.begin("drawn")
    assert not is_due()
    del store
    assert is_due()
    end.end("drawn")


@pytest.mark.usefixtures("in_demo", "workers")
def test_weights_that_are_sent_end_a_round() -> None:
    text = f"graph: due\nextends: {GRAPH}\nedits:\n"
    text += f"  - replace: {{drawn: {{op: '{OPS}:draw_until_due', model: policy, n: 2}}}}\n"
    Path("due.yaml").write_text(text)
    stream = "schedule={iterations: 2, buffer: {staleness: 1}}"
    assert check(run("a", stream, graph="due.yaml", inline=False), 1) == [*range(16)]


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo", "workers")
def test_a_filter_that_waits_for_rewards_does_not_hold_generation_up() -> None:
    note = Path("rounds.jsonl").resolve()
    drawn = f"op: '{OPS}:draw_by_token', model: policy, n: 2, longest: 40, note: '{note}'"
    text = f"graph: late\nextends: {GRAPH}\nedits:\n  - replace: {{drawn: {{{drawn}}}}}\n"
    text += f"  - replace: {{judged: {{op: '{OPS}:judge_late', note: '{note}'}}}}\n"
    text += f"  - add: {{some: {{op: '{OPS}:some', refill: true}}}}\n"
    Path("late.yaml").write_text(text + "  - set: {update.rows: some}\n")
    check(run("a", "schedule.iterations=2", graph="late.yaml", inline=False), 2, whole=False)


def test_noise_moves_no_groups_and_a_slow_worker_gets_its_share() -> None:
    shares, chance = WorkerShares(4, deals=True, moves=True), np.random.default_rng(0)
    for _ in range(20 * MIN_ROUNDS):
        for worker in range(4):
            shares.measure(worker, 640 * chance.uniform(0.7, 1.3), 10, 1.0)
        shares.adapt()
    assert shares.shares.tolist() == [1, 1, 1, 1]
    shares.deal(range(16), [])
    for _ in range(5 * MIN_ROUNDS):
        for worker in range(4):
            shares.measure(worker, 160 if worker == 2 else 640, 10, 1.0)
        shares.adapt()
    assert shares.shares.tolist() == [1, 1, pytest.approx(0.25, rel=0.3), 1]
    shares.go_on(range(8, 16))
    has = [[*shares.homes.values()].count(worker) for worker in range(4)]
    assert has[2] == 1 and max(has) == 3
    shares.deal(range(16, 26), range(8, 16))
    assert [*shares.homes.values()].count(2) == 1
