"""Streaming predicted: rounds by hand, bounds that hold for any lengths, and what the plan says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from region_work import STREAMED, work
from rlgraph.autoplace import autoplace, offer
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan, Target
from rlgraph.ir.prediction import StreamForecast
from rlgraph.planning.host_memory import buffer_bytes
from rlgraph.planning.predict import Scenario
from rlgraph.planning.simulate import occupied
from rlgraph.printing.headline import headline
from rlgraph.request import PlanRequest
from rlgraph.search.layout import PoolLayout
from rlgraph.search.text import contest_text
from rlgraph.streaming.rules import Window
from rlgraph.streaming.simulate import simulate_stream, stream_course
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle
from rlgraph.view.contents import contents
from rlgraph.view.stream import LANES
from rlgraph.view.subject import Subject
from rlgraph.view.terminal import terminal_text
from rlgraph.view.timeline import expected


def test_what_becomes_of_each_group() -> None:
    """Two iterations of four groups may be begun; ten tokens are a round, and a sync stops both pools."""
    course = stream_course(work([10.0]), update=7, sync=1, iterations=3)
    assert [*course.syncs] == [18.0, 29.0, 40.0]
    assert [course.groups[n] for n in (0, 4, 8, 12)] == [
        [0, 0.0, 10.0, 10.0],  # with the weights of iteration 0; drawn after ten seconds, and used
        [0, 0.0, 10.0, 18.0],
        [1, 18.0, 28.0, 29.0],
        [2, 29.0, 39.0],
    ]


def test_the_page_has_some_iterations_of_the_steady_state() -> None:
    plan = compile_graph("grpo", STREAMED, 8, Target("h100-8"))
    told = contents(Subject(plan, compiled=True))["stream"]
    begin, end = told["window"]
    assert sum(begin + 1e-3 < at < end + 1e-3 for at, _ in told["syncs"]) == 3
    lanes: dict[int, float] = {}
    for lane, _, weights, begun, drawn, used in sorted(told["groups"], key=lambda group: group[3]):
        assert lanes.get(lane, 0.0) <= begun <= drawn and begun < end
        assert sum(at <= begun for at, _ in told["syncs"]) == weights
        lanes[lane] = used or drawn
        if used:
            (iteration,) = [n for start, _, n in told["updates"] if start == used]
            assert 0 <= iteration - weights <= 1, "no older than the bound"
    assert 16 <= len(lanes) <= LANES < told["every"] * LANES, "of 256 groups some are drawn"
    together = compile_graph("grpo", STREAMED[:1], 8, Target("h100-8"))
    assert contents(Subject(together, compiled=True))["stream"] is None
    assert contents(Subject(compile_graph("grpo", STREAMED, 8), compiled=True))["stream"] is None


def test_without_staleness_the_two_take_turns() -> None:
    course = simulate_stream(work([10.0], staleness=0), update=7, sync=1)
    assert (course.seconds, course.generating, course.age, course.oldest) == (18, 11, 0, 0)


@pytest.mark.parametrize("update", [3, 30])
def test_equal_lengths_overlap(update: float) -> None:
    course = simulate_stream(work([10.0]), update=update, sync=1)
    assert course.seconds == max(10, update) + 1
    assert (course.oldest, course.waiting) == (1, 8)


def test_slots_that_are_fewer_than_samples() -> None:
    """Eight samples of ten tokens on two servers with two slots each: two waves."""
    course = simulate_stream(work([10.0], servers=2, slots=2), update=3, sync=1)
    assert course.seconds == 21


def test_rewards_beside_hold_up_rows_and_no_round() -> None:
    alone = simulate_stream(work([10.0], staleness=0), update=7, sync=1)
    beside = simulate_stream(work([10.0], staleness=0, measuring_elsewhere=(2.0, 0.5)), update=7, sync=1)
    on_pool = simulate_stream(work([10.0], staleness=0, measuring_on_pool=(2.0, 0.5)), update=7, sync=1)
    assert beside.seconds == on_pool.seconds == alone.seconds + 6
    assert (beside.generating, on_pool.generating) == (alone.generating, alone.generating + 6)


def test_a_filter_that_keeps_half_doubles_the_rounds() -> None:
    course = simulate_stream(work([10.0], staleness=0, kept_share=0.5), update=7, sync=1)
    # eight rows are begun, four stay; then four more and two stay; at last two and two
    assert course.seconds > 7 + 1 + 2 * 10


def test_what_is_under_way_is_read_again_with_new_weights() -> None:
    tail = [10.0] * 15 + [150.0]

    def seconds(staleness: int, price: float) -> float:
        reads = work(
            tail, staleness=staleness, chunk=10, read=lambda samples, tokens: samples * tokens * price
        )
        return simulate_stream(reads, update=5, sync=1).seconds

    assert seconds(4, 0.01) > seconds(4, 0.0)
    assert seconds(0, 0.01) == seconds(0, 0.0)  # nothing is under way when weights change


def test_a_long_tail_is_hidden_by_staleness() -> None:
    tail = [10.0] * 15 + [150.0]
    seconds = [simulate_stream(work(tail, staleness=k, chunk=10), update=5, sync=1).seconds for k in range(5)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[4] < 0.5 * seconds[0]


def test_what_would_be_too_old_is_dropped_or_waited_for() -> None:
    tail = [10.0] * 15 + [150.0]
    window = Window(rows=8, group=2, staleness=1, too_old="drop")
    dropping = simulate_stream(work(tail, chunk=10, window=window), update=5, sync=1)
    waiting = simulate_stream(work(tail, chunk=10), update=5, sync=1)
    assert dropping.seconds < 0.5 * waiting.seconds
    assert 0.1 < dropping.dropped < 0.5 and waiting.dropped == 0


def test_in_order_weights_change_where_nothing_is_begun() -> None:
    """Eight rows of the next iteration are drawn before the sync, so that only an update can hide them."""
    in_order = Window(rows=8, group=2, staleness=1, order="in_order")
    course = simulate_stream(work([10.0], window=in_order), update=30, sync=1)
    assert (course.seconds, course.oldest) == (31, 1)
    short = simulate_stream(work([10.0], window=in_order), update=3, sync=1)
    assert short.seconds == 11


@given(
    st.lists(st.floats(1, 500), min_size=1, max_size=24),
    st.integers(0, 3),
    st.sampled_from(["fifo", "in_order"]),
    st.sampled_from(["wait", "drop"]),
    st.none() | st.integers(1, 9),
    st.floats(0.1, 300),
    st.floats(5, 200),
    st.floats(0, 50),
)
def test_bounds_hold_for_any_lengths(
    lengths: list[float],
    staleness: int,
    order: str,
    too_old: str,
    in_flight: int | None,
    update: float,
    chunk: float,
    beside: float,
) -> None:
    window = Window(8, 2, staleness, order, too_old, in_flight)
    streamed = work(lengths, chunk=chunk, window=window, measuring_elsewhere=(beside, 0.1))
    course = simulate_stream(streamed, update, sync=1)
    assert course == simulate_stream(streamed, update, sync=1)
    assert 0 <= course.age <= course.oldest <= staleness
    assert course.waiting <= (staleness + 1) * 8
    assert course.seconds >= max(course.generating, update + 1) - 1e-6


def planned(*settings: str, **assumed: Any) -> tuple[Plan, StreamForecast]:
    plan = compile_graph("grpo", [*STREAMED, *settings], target=Target("h100-8", **assumed))
    assert plan.predicted and plan.predicted.stream
    return plan, plan.predicted.stream


def test_a_plan_tells_where_streaming_gains() -> None:
    plan, told = planned("schedule.buffer.staleness=4", response_tokens=2000)
    assert plan.predicted and plan.predicted.headline and told.ahead
    assert plan.predicted.seconds == told.seconds
    assert plan.predicted.headline.iteration.low == pytest.approx(told.seconds[0])
    for grade in (0, 1):
        assert told.seconds[grade] < 0.8 * told.ahead[grade] < 0.8 * told.synchronous[grade]
        busiest = max(took[grade] for took in plan.predicted.pools.values())
        assert busiest <= told.seconds[grade] + 1e-5
    assert "x as fast as synchronous" in headline(plan)["streaming"]
    drawn = next(step for step in plan.steps if step.unfinished)
    assert drawn.seconds == told.drawing


def test_a_plan_claims_no_gain_of_short_equal_lengths() -> None:
    plan, told = planned("rollout.max_new_tokens=256", response_tokens=256)
    assert told.ahead
    assert all(told.seconds[grade] >= told.ahead[grade] * 0.999 for grade in (0, 1))
    assert "no gain over `by: batch`" in headline(plan)["streaming"]


def test_a_plan_tells_where_streaming_loses() -> None:
    plan, told = planned("schedule.buffer={staleness: 0, chunk: 8}", response_tokens=2000)
    assert told.ahead is None and told.seconds[1] > told.synchronous[1]
    assert "slower than synchronous" in headline(plan)["streaming"]


def test_synchronous_and_ahead_are_what_those_graphs_are_predicted_to_take() -> None:
    _, told = planned(response_tokens=2000)
    others = []
    for schedule in (
        "schedule.buffer={staleness: 0, by: batch}",
        "schedule.buffer={staleness: 1, by: batch}",
    ):
        settings = [*STREAMED, "schedule.buffer=null", schedule]
        target = Target("h100-8", response_tokens=2000)
        plan = compile_graph("grpo", settings, target=target)
        assert plan.predicted
        others.append(plan.predicted.seconds)
    assert told.synchronous == pytest.approx(others[0], rel=0.02)
    assert told.ahead == pytest.approx(others[1], rel=0.02)


def test_a_heavier_tail_gains_more() -> None:
    """Of as many tokens: without streaming an iteration waits for its longest response."""
    gains = []
    for p99 in (1.0, 10.0):
        lengths = {"mean": 500, "p50": 1.0, "p99": p99}
        _, told = planned("schedule.buffer.staleness=4", response_tokens=lengths)
        assert told.ahead
        gains.append(middle(told.ahead) / middle(told.seconds))
    assert gains[1] > 1.3 * gains[0]


@pytest.mark.slow
def test_a_round_has_a_price_where_its_pool_waits_for_it(tmp_path: Path) -> None:
    """At servers samples stay in flight, so that what the driver takes between two rounds costs nothing."""
    factors = tmp_path / "factors.yaml"
    factors.write_text("calibration: slow driver\nround: [100, 100]\n")
    for engine, is_dearer in (("transformers", True), ("sglang", False)):
        settings = [f"models.policy.serve.engine={engine}"]
        _, told = planned(*settings, response_tokens=2000)
        _, slow = planned(*settings, response_tokens=2000, calibration=str(factors))
        assert (slow.drawing[0] > told.drawing[0] + 10) is is_dearer


def test_calibrated_generation_is_that_of_rounds_too(tmp_path: Path) -> None:
    factors = tmp_path / "factors.yaml"
    factors.write_text("calibration: slow\ngenerate: [5, 5]\n")
    _, told = planned(response_tokens=2000)
    _, slow = planned(response_tokens=2000, calibration=str(factors))
    assert middle(slow.drawing) > 3.9 * middle(told.drawing)


def test_the_page_is_calibrated_as_the_plan_is(tmp_path: Path) -> None:
    factors = tmp_path / "factors.yaml"
    factors.write_text("calibration: slow\ngenerate: [5, 5]\n")
    plan, told = planned("schedule.buffer.staleness=0", response_tokens=2000, calibration=str(factors))
    begin, end = contents(Subject(plan, compiled=True))["stream"]["window"]
    assert (end - begin) / 3 == pytest.approx(told.seconds[0], rel=0.1)


@pytest.mark.slow
def test_few_in_flight_take_longer() -> None:
    _, told = planned("schedule.buffer.in_flight=8", response_tokens=2000)
    _, free = planned(response_tokens=2000)
    assert told.seconds[0] > 1.5 * free.seconds[0]


def test_text_page_and_json_say_the_same() -> None:
    plan, told = planned()
    said = headline(plan)
    text = CliRunner().invoke(main, ["plan", "grpo", *STREAMED, "--cluster", "h100-8"]).output
    made = json.loads(
        CliRunner()
        .invoke(main, ["plan", "grpo", *STREAMED, "--cluster", "h100-8", "--format", "json"])
        .stdout
    )
    assert made["predicted"]["stream"] == json.loads(json.dumps(vars(told)))
    for label in ("streaming", "age of rows"):
        assert said[label] in text
        assert contents(Subject(plan))["headline"][1][label] == said[label]


@pytest.mark.slow
def test_a_search_offers_what_streams_and_does_not_take_it() -> None:
    settings, target = ["rollout.max_new_tokens=8192"], Target("h100-4", response_tokens=1000)
    found, compilation = autoplace(PlanRequest("grpo", settings, target=target))
    best = compilation.plan
    offered = offer(PlanRequest("grpo", settings, target=target), found)
    assert best.schedule.stream is None and offered and offered.plan and offered.plan.predicted
    assert offered.seconds < 0.9 * found[0].seconds
    told = contest_text(found, offer=offered)
    assert "where generation streams an iteration takes 0." in told
    assert all(setting in told for setting in ("schedule.buffer=", "loss.kind=decoupled_ppo"))
    again = compile_graph("grpo", [*settings, *overrides(offered.settings)], target=target)
    assert again.predicted and again.predicted.seconds == offered.plan.predicted.seconds


def test_a_search_offers_no_stream_where_nothing_generates_or_it_streams() -> None:
    target = Target("h100-2")
    found, _ = autoplace(PlanRequest("sft", [], target=target))
    assert offer(PlanRequest("sft", [], target=target), found) is None
    plan, _ = planned()
    streaming = replace(found[0], layout=PoolLayout(4, frozenset(), 1, 2048, False), plan=plan)
    assert offer(PlanRequest("grpo", [*STREAMED], target=Target("h100-8")), [streaming]) is None


def test_the_buffer_is_counted_on_its_host() -> None:
    plan, told = planned()
    scenario = Scenario.of(Target("h100-8"))
    held = buffer_bytes(plan, scenario.work(plan))
    # of each token of mean length its id, mask, log-prob and advantage; of a row its reward
    each = (8 + 1 + 4 + 4) * scenario.work(plan).mean + 4
    assert held == {"finished": pytest.approx(told.begun * each)}
    longer = replace(plan.regions["finished"], keep=3)
    more = buffer_bytes(replace(plan, regions={"finished": longer}), scenario.work(plan))
    assert more["finished"] == 2 * held["finished"]


def test_a_streamed_plan(golden: Callable[[str, str], None]) -> None:
    golden(
        "plan/streamed.txt",
        CliRunner().invoke(main, ["plan", "grpo", *STREAMED, "--cluster", "h100-8"]).stdout,
    )


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_page_draws_what_is_predicted(staleness: int) -> None:
    """Each iteration takes as long as the prediction says, no pool does two things at once, none overlaps."""
    plan, told = planned(f"schedule.buffer.staleness={staleness}", response_tokens=2000)
    events, took = expected(plan)
    assert took == pytest.approx(middle(told.seconds))
    update = next(step.id for step in plan.steps if step.updated)
    ends = [event.end for event in events if event.step.id == update]
    assert [later - end for end, later in pairwise(ends)] == pytest.approx([took] * (len(ends) - 1))
    for pool in plan.pools:
        mine = sorted((event.start, event.end) for event in events if pool in occupied(event.step))
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))
    shown = {(event.step.id, event.iteration) for event in events}
    assert shown == {(step.id, n) for step in plan.steps for n in range(staleness + 3)}
    assert terminal_text(plan)
