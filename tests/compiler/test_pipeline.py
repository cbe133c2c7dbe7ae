"""Generation that runs ahead of training: what leads, in which order, and that every promise holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlgraph.compiler import compile_graph
from rlgraph.frontend.bind import bind
from rlgraph.ir.plan import Plan
from rlgraph.lowering import lower
from rlgraph.passes.lower import make_plan
from rlgraph.planning.overlap import guess, pipeline
from rlgraph.planning.simulate import BrokenPlanError, Event, busy, period, simulate, slot_steps
from rlgraph.printing.plan_text import plan_text
from rlgraph.syntax.source import Source, parse
from rlgraph.view.timeline import lanes
from share import examples

GRAPH = """
graph: split
models:
  policy: {path: a/b, optimizer: {lr: 1e-4}, train: {pool: train}, serve: {pool: gen}}
  ref: {path: a/b, frozen: true, train: {pool: REF}}
nodes:
  prompts: {op: data.prompts, files: [a.jsonl], batch: 8}
  rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 8}
  rewards: {op: reward.exact, pool: REWARDS}
  ref_logprobs: {op: logprobs, model: ref}
  advantages: {op: advantage.grpo, pool: ADVANTAGES}
  update_policy:
    {op: update.policy, model: policy, minibatches: 2, loss: {kind: ppo_clip}, kl_coef: 0.1,
     in: {old_logprobs: rollout_logprobs}}
schedule: {iterations: 3, buffer: {staleness: STALENESS, by: batch}}
pools: {train: {devices: 1}, gen: {devices: 1}MORE}
"""


def unpipelined(staleness: int, ref: str = "train", rewards: str = "gen", advantages: str = "train") -> Plan:
    more = ", third: {devices: 1}" if "third" in (ref, rewards, advantages) else ""
    words = {
        "REF": ref,
        "REWARDS": rewards,
        "ADVANTAGES": advantages,
        "STALENESS": str(staleness),
        "MORE": more,
    }
    text = GRAPH
    for word, value in words.items():
        text = text.replace(word, value)
    return make_plan(lower(bind(parse(Source("split.yaml", text)), 4)), None, "")


def timed(plan: Plan, **seconds: float) -> dict[int, float]:
    return {step.id: seconds.get(step.node, 0.0) for step in plan.steps}


def ends(events: list[Event], node: str) -> list[float]:
    return [event.end for event in events if event.step.node == node]


def planned(staleness: int, ref: str = "train", **seconds: float) -> tuple[Plan, dict[int, float]]:
    plan = unpipelined(staleness, ref)
    made = pipeline(plan, timed(plan, **seconds))
    return made, timed(made, **seconds)


def test_without_staleness_nothing_leads() -> None:
    plan = unpipelined(0)
    assert pipeline(plan) is plan
    assert plan.slot == tuple(step.id for step in plan.steps)


def test_generation_overlaps_training() -> None:
    plan, seconds = planned(1, rollout=4.0, update_policy=4.0)
    events = simulate(plan, seconds, 5)
    assert ends(events, "rollout") == [4, 8, 12, 16, 20]
    assert ends(events, "update_policy") == [8, 12, 16, 20, 24]
    alone = unpipelined(0)
    both = timed(alone, rollout=4.0, update_policy=4.0)
    assert ends(simulate(alone, both, 5), "update_policy")[-1] == 40


@pytest.mark.parametrize(("rollout", "update"), [(4.0, 2.0), (2.0, 4.0), (3.0, 3.0)])
def test_the_steady_state_is_the_busiest_pool(rollout: float, update: float) -> None:
    plan, seconds = planned(1, rollout=rollout, update_policy=update, **{"sync:policy": 0.5})
    assert period(simulate(plan, seconds, 12), 12) == pytest.approx(max(busy(plan, seconds).values()))


def test_three_pools_need_two_iterations_ahead() -> None:
    took = {"rollout": 4.0, "ref_logprobs": 4.0, "update_policy": 4.0}
    one, first = planned(1, "third", **took)
    two, second = planned(2, "third", **took)
    assert period(simulate(one, first, 10), 10) == pytest.approx(6)  # a chain of 12 over 2 iterations
    assert period(simulate(two, second, 14), 14) == pytest.approx(4)
    leads = {step.node: step.lead for step in two.steps}
    assert (leads["rollout"], leads["ref_logprobs"], leads["update_policy"]) == (2, 1, 0)


def test_what_is_free_goes_where_there_is_slack() -> None:
    # the reference on the generation's pool: scored before the next rollout or after, never between
    plan, seconds = planned(1, "gen", rollout=3.0, ref_logprobs=2.0, update_policy=5.0)
    assert period(simulate(plan, seconds, 12), 12) == pytest.approx(5)


def test_prologue_and_epilogue() -> None:
    plan, _ = planned(2, rollout=1.0, update_policy=1.0)
    lines: dict[int, list[str]] = {}
    for slot in range(-2, 3):
        for iteration, step in slot_steps(plan, slot, 0, 3):
            if step.node in ("rollout", "update_policy"):
                lines.setdefault(slot, []).append(f"{step.node}({iteration})")
    assert lines == {
        -2: ["rollout(0)"],
        -1: ["rollout(1)"],
        0: ["rollout(2)", "update_policy(0)"],
        1: ["update_policy(1)"],
        2: ["update_policy(2)"],
    }


def test_a_sync_that_comes_after_the_update_is_found() -> None:
    plan, seconds = planned(1, rollout=1.0, update_policy=1.0)
    leads = {step.id: step.lead for step in plan.steps}
    late = [n for n in plan.slot if not leads[n]] + [n for n in plan.slot if leads[n]]
    with pytest.raises(
        BrokenPlanError, match="`sync:policy` of iteration 1 would read policy@1, not policy@0"
    ):
        simulate(replace(plan, slot=tuple(late)), seconds, 4)


def test_a_step_before_what_it_waits_for_is_found() -> None:
    plan, seconds = planned(1, rollout=1.0, update_policy=1.0)
    number = {step.node: step.id for step in plan.steps}
    early = [number["rewards"], *(n for n in plan.slot if n != number["rewards"])]
    with pytest.raises(
        BrokenPlanError, match="`rewards` of iteration 0 waits for `rollout`, submitted behind it"
    ):
        simulate(replace(plan, slot=tuple(early)), seconds, 4)


def test_a_rollout_without_its_sync_is_found() -> None:
    plan, seconds = planned(1, rollout=1.0, update_policy=1.0)
    slot = tuple(n for n in plan.slot if plan.steps[n - 1].kind != "sync")
    cut = tuple(replace(step, after=tuple(n for n in step.after if n in slot)) for step in plan.steps)
    with pytest.raises(BrokenPlanError, match="would read policy@0, not policy@1"):
        simulate(replace(plan, slot=slot, steps=cut), seconds, 4)


POOLS = st.sampled_from(["train", "gen", "third"])


@examples(60, derandomize=False)
@given(st.integers(1, 3), POOLS, POOLS, POOLS, st.randoms(use_true_random=False))
def test_every_pipeline_keeps_its_promises(
    staleness: int, ref: str, rewards: str, advantages: str, chance: random.Random
) -> None:
    plan = unpipelined(staleness, ref, rewards, advantages)
    took = {step.node: chance.choice([0.0, 0.1, 1.0, 2.0, 5.0]) for step in plan.steps}
    made = pipeline(plan, timed(plan, **took))
    seconds = timed(made, **took)
    count = 8 + 6 * staleness
    events = simulate(made, seconds, count)  # raises where a step would wait for ever, or see other weights
    assert sorted(made.slot) == [step.id for step in made.steps]
    assert_no_pool_does_two_things(events)
    assert_old_weights_are_not_too_old(events, staleness)
    # never slower than taking turns, never faster than the busiest pool
    alone = unpipelined(0, ref, rewards, advantages)
    turns = period(simulate(alone, timed(alone, **took), 1), 1)
    assert max(busy(made, seconds).values()) - 1e-9 <= period(events, count) <= turns + 1e-9


@examples(40, derandomize=False)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 0.5))
def test_two_pools_are_within_five_percent_of_the_bound(
    rollout: float, update: float, score: float, sync: float
) -> None:
    plan, seconds = planned(
        1, rollout=rollout, update_policy=update, ref_logprobs=score, **{"sync:policy": sync}
    )
    bound = max(busy(plan, seconds).values())
    assume(bound > 0)
    assert period(simulate(plan, seconds, 14), 14) <= 1.05 * bound


def assert_no_pool_does_two_things(events: list[Event]) -> None:
    last: dict[str, float] = {}
    for event in events:
        for pool in {event.step.pool, event.step.source} - {""}:
            assert event.start >= last.get(pool, 0.0) - 1e-9
            last[pool] = event.end


def assert_old_weights_are_not_too_old(events: list[Event], staleness: int) -> None:
    """Count updates by when they end, against the version that each rollout was synced at."""
    synced = 0
    order = sorted(
        (e for e in events if e.step.node in ("sync:policy", "update_policy")), key=lambda e: e.end
    )
    done = 0
    versions: dict[int, int] = {}
    for event in order:
        if event.step.updated:
            done += 1
        else:
            versions[event.iteration] = synced = done
    for iteration, version in versions.items():
        assert iteration - staleness <= version <= iteration, (iteration, version)
    assert synced <= done


def test_guesses_order_steps_as_they_usually_take() -> None:
    plan = unpipelined(1)
    rank = {step.node: guess(step) for step in plan.steps}
    assert (
        rank["rollout"] > rank["update_policy"] > rank["ref_logprobs"] > rank["sync:policy"] > rank["rewards"]
    )


def test_steps_of_one_iteration_come_in_an_order_that_frees_last() -> None:
    made, _ = planned(1, rollout=1.0, update_policy=1.0)
    held: set[str] = set()
    for step in made.steps:
        assert {*step.reads} <= held
        held |= {*step.writes}
        held -= {*step.frees}
    assert not held


def test_a_reward_beside_the_devices_holds_up_only_those_that_read_it() -> None:
    plan = compile_graph("grpo", devices=1)
    (reward,) = (step for step in plan.steps if step.on_host)
    seconds = dict.fromkeys((step.id for step in plan.steps), 1.0)
    events = {event.step.node: event for event in simulate(plan, {**seconds, reward.id: 2.5}, 1)}
    assert reward.node == "rewards" and "on the CPUs of main[0]" in plan_text(plan)
    assert events["old_logprobs"].start < events["rewards"].end <= events["advantages"].start
    assert busy(plan, seconds) == {"main": len(plan.steps) - 1}
    lane = next(lane for lane in lanes(plan) if lane.beside)
    assert lane.steps == {reward.id}


def test_steps_are_ordered_as_if_a_reward_beside_the_devices_took_none_of_their_time() -> None:
    plan = compile_graph("decoupled_ppo", devices=4)
    took = {"sync:policy": 4.0, "prompts": 4.0, "repartition:rollout": 2.0, "rollout": 1.0}
    took |= {"repartition:answer*samples": 0.5, "answer*samples": 2.0, "rewards": 4.0, "advantages": 4.0}
    took |= {"repartition:old_logprobs": 0.5, "old_logprobs": 1.0, "repartition:update_policy": 4.0}
    made = pipeline(plan, timed(plan, **took))
    assert period(simulate(made, timed(made, **took), 12), 12) < 19  # ordered as if it did, 21.5
