"""A pool that trains is lent to generation while it waits: by prices and memory, and with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from region_work import STREAMED, work
from rlgraph.compiler import compile_graph
from rlgraph.costs.memory import away_items
from rlgraph.errors import GraphError
from rlgraph.ir.actions import Lend, Sync
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.streaming.rules import Window
from rlgraph.streaming.simulate import simulate_stream
from rlgraph.view.stream import recorded_stream
from rlgraph.view.timeline import expected

SLOTS: dict[str, Any] = {
    "slots": 2,
    "chunk": 5,
}  # eight samples of ten tokens: four waves, or two on two pools


def planned(*settings: str, **assumed: Any) -> Plan:
    return compile_graph("grpo", [*STREAMED, *settings], target=Target("h100-8", **assumed))


def lending(plan: Plan) -> Step | None:
    return next((step for step in plan.steps if isinstance(step.action, Lend)), None)


def note(plan: Plan) -> str:
    return next((note for note in plan.notes if "lent" in note), "")


def test_twice_the_servers_take_half_as_long_where_training_waits() -> None:
    alone = simulate_stream(work([10.0], staleness=0, **SLOTS), update=7, sync=1)
    lent = simulate_stream(work([10.0], staleness=0, lent_servers=1, **SLOTS), update=7, sync=1)
    assert (alone.seconds, lent.seconds) == (48, 28)


def test_an_update_waits_for_a_round_that_is_lent() -> None:
    """Rewards come in the middle of a round of five tokens, which the pool draws to its end."""
    told = {"staleness": 1, "measuring_elsewhere": (2.0, 0.0), "chunk": 5}
    alone = simulate_stream(work([10.0], **told), update=1, sync=1)
    lent = simulate_stream(work([10.0], lent_servers=1, **told), update=1, sync=1)
    assert alone.seconds <= lent.seconds <= alone.seconds + 5


def test_what_moves_is_read_again() -> None:
    def seconds(price: float) -> float:
        priced = work(
            [10.0] * 15 + [150.0],
            staleness=1,
            lent_servers=1,
            chunk=10,
            read=lambda n, each: n * each * price,
        )
        return simulate_stream(priced, update=5, sync=1).seconds

    assert seconds(0.01) > seconds(0.0)


def test_where_training_is_the_slower_nothing_changes() -> None:
    course = [simulate_stream(work([10.0], lent_servers=lent), update=40, sync=1) for lent in (0, 1)]
    assert course[0].seconds == course[1].seconds


@given(
    lengths=st.lists(st.floats(1, 200), min_size=1, max_size=6),
    staleness=st.integers(0, 3),
    update=st.floats(0.1, 100),
    too_old=st.sampled_from(["wait", "drop"]),
    beside=st.floats(0, 5),
)
def test_bounds_hold_whatever_is_lent(
    lengths: list[float], staleness: int, update: float, too_old: str, beside: float
) -> None:
    window = Window(8, 2, staleness, "fifo", too_old)
    course = simulate_stream(
        work(lengths, chunk=20, window=window, lent_servers=2, measuring_elsewhere=(beside, 0.1)),
        update,
        sync=1,
    )
    assert 0 <= course.age <= course.oldest <= staleness
    assert course.waiting <= (staleness + 1) * 8


def test_a_plan_lends_where_it_pays_and_says_why() -> None:
    plan = planned("schedule.buffer.staleness=1", response_tokens=2000)
    forbidden = planned("schedule.buffer.lend=false", response_tokens=2000)
    step = lending(plan)
    assert step and isinstance(step.action, Lend)
    assert (step.pool, step.action.path, [*step.models]) == ("train", "ipc", ["policy"])
    assert step.because.startswith("train waits for ") and "shorter for it; its engine takes " in step.because
    assert lending(forbidden) is None and not note(forbidden)
    assert plan.predicted and forbidden.predicted
    assert plan.predicted.seconds[1] < forbidden.predicted.seconds[1]
    assert plan.digest == forbidden.digest, "a run may be resumed with the other"
    assert plan.peak and all(peak.fits for peak in plan.peak.values())
    shown = {(event.step.id, event.iteration) for event in expected(plan)[0]}
    assert (step.id, 0) in shown


def test_on_the_page_weights_come_with_the_sync_of_the_other_pool() -> None:
    plan = planned("schedule.buffer.lend=true")
    syncs = [step for step in plan.steps if isinstance(step.action, Sync)]
    assert [isinstance(step.action, Lend) for step in syncs] == [False, True]

    def event(name: str, step: int, start: float, **more: str) -> dict[str, Any]:
        about = {"phase": "train", "iteration": 1, "step": step, **more}
        return {"name": name, "ts": start, "dur": 1e6, "args": about}

    group = event("prompt 0, weights 0", 4, 0.0, part="group 0")
    ran = [event(step.node, step.id, n * 2e6) for n, step in enumerate(syncs)]
    told = recorded_stream(plan, [group, *ran], [1], start_of_run=0)
    assert told and told["syncs"] == [[1.0, 0]]


def test_the_cache_of_a_pool_that_is_lent_is_off_it_while_it_trains() -> None:
    plan = planned()
    names = [(step.node.partition(":")[0], step.pool) for step in plan.steps]
    order = [names.index((name, "train")) for name in ("lend", "wake", "collect", "sleep", "update_policy")]
    assert order == sorted(order)
    assert [item.name for item in away_items(plan, "train")] == ["kv"]
    assert not [*away_items(plan, "gen")], "the other pool has its own"


LARGE = (
    "models.policy.path=Qwen/Qwen2.5-32B",
    "models.policy.train={optimizer_offload: true, micro_tokens: 4096, pool: train}",
    "models.ref.path=Qwen/Qwen2.5-0.5B",
    "pools={train: {devices: 6}, gen: {devices: 2}}",
    "rollout.max_new_tokens=2048",
)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (LARGE, "with its engine a device takes 85.5 GB of 80 GB in `lend:train`"),
        (("schedule.buffer.order=in_order",), "`order: in_order` repeats to the bit"),
        (("pools={train: {devices: 7}, gen: {devices: 1}}",), "do not hold rows as the 1 of pool gen"),
        (("models.policy.serve.tensor_parallel=2", "pools.train.devices=3"), "divide into servers of 2"),
        (("rollout.max_new_tokens=64", "pools={train: {devices: 2}, gen: {devices: 6}}"), "it waits for "),
    ],
)
def test_a_plan_that_does_not_lend_says_why(settings: tuple[str, ...], reason: str) -> None:
    plan = planned(*settings)
    assert lending(plan) is None
    assert note(plan).startswith("pool train is not lent to generation: ") and reason in note(plan)


def test_what_can_not_be_lent_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(GraphError, match=r"`schedule.buffer.lend: true`, and `order: in_order` repeats"):
        compile_graph("grpo", [*STREAMED, "schedule.buffer={lend: true, order: in_order}"], 8)


def test_without_a_cluster_a_pool_is_lent_where_the_graph_asks() -> None:
    asked = compile_graph("grpo", [*STREAMED, "schedule.buffer.lend=true"], 8)
    assert (step := lending(asked)) and "asks for it" in step.because
    assert lending(compile_graph("grpo", [*STREAMED], 8)) is None
    small = compile_graph("grpo", [*STREAMED, "schedule.buffer.lend=true"], 8, Target("h100-8"))
    assert lending(small) and small.predicted
