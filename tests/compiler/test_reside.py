"""Engines that leave their devices: nothing runs without what it needs, nothing moves in vain, all fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.memory import EngineComponent, Footprint, away_items
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.plan import Plan, Step
from rlgraph.lowering import plan_tree
from rlgraph.planning import offload
from rlgraph.planning.auto_settings import fixed
from rlgraph.planning.offload import Gap, _chosen_gaps, _over_iterations, _Search, reside
from rlgraph.planning.predict import Scenario, predict
from rlgraph.syntax.source import Source, parse
from share import examples

H100 = load_cluster("h100-8", margin=0.0)
BFLOAT = [f"models.{name}.train.dtype=bfloat16" for name in ("policy", "ref")]
SMALL = ["models.policy.serve.dtype=bfloat16", *BFLOAT]


def footprint(plan: Plan, cluster: Cluster) -> Footprint:
    return Footprint(plan, cluster, workload(plan), sizes_of(plan))


def moved(step: Step) -> set[EngineComponent]:
    move = step.action
    assert isinstance(move, MoveEngine)
    return {EngineComponent(move.model, move.engine, part) for part in move.parts}


def assert_sound(plan: Plan, cluster: Cluster) -> None:
    """Replay the states of every engine, through an iteration, an evaluation, and an iteration again."""
    print_ = footprint(plan, cluster)
    order = [plan.steps[number - 1] for number in plan.slot]
    away = {item for pool in plan.pools for item in away_items(plan, pool)}
    for steps in (order, plan.eval_steps, order):
        for step in steps:
            direction = step.action.direction if isinstance(step.action, MoveEngine) else ""
            if direction == "back":
                assert moved(step) <= away, f"{step.node} brings back what is there"
                away -= moved(step)
            if direction == "off":
                assert not moved(step) & away, f"{step.node} takes away what is away"
            for pool in {step.pool, step.source} - {""}:
                assert not print_.needs(pool, step) & away, f"{step.node} runs without what it needs"
                held = sum(size for item, size in print_.items(pool).items() if item not in away)
                used = held + print_.transient(pool, step).total() + cluster.reserve
                assert used <= cluster.memory, f"{step.node} takes {used} of {cluster.memory}"
            if direction == "off":
                away |= moved(step)
        assert away == {item for pool in plan.pools for item in away_items(plan, pool)}, (
            "an iteration ends in another state than it began in"
        )


def moves(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if isinstance(step.action, MoveEngine)]


def tight(plan: Plan, cluster: Cluster, share: float) -> Cluster:
    """The cluster with ``share`` of the way from the least memory that fits to where nothing has to move."""
    roomy = cluster.model_copy(update={"memory": 1e15})
    most = max(peak.bytes for peak in footprint(plan, roomy).peaks().values())
    cramped = footprint(plan, cluster.model_copy(update={"memory": 1.0}))
    least = max(peak.bytes for peak in replace(cramped, plan=reside(cramped)).peaks().values())
    return cluster.model_copy(update={"memory": least + share * (most - least)})


def test_roomy_devices_move_nothing() -> None:
    plan = predict(compile_graph("ppo", SMALL, 8), Scenario(H100))
    assert not moves(plan) and not plan.away
    assert_sound(plan, H100)


@pytest.mark.parametrize("graph", ["ppo", "grpo", "demo", "rft"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_what_is_short_of_memory_moves_engines(graph: str, share: float) -> None:
    settings = ["models.policy.path=Qwen/Qwen2.5-1.5B"] if graph == "demo" else []
    plan = compile_graph(graph, [*settings, "models.policy.train.micro_tokens=2048"], 8)
    cluster = tight(plan, H100, share)
    made = predict(plan, Scenario(cluster))
    assert moves(made) or share > 0 or graph == "demo"  # there the peak is where all are needed
    assert_sound(made, cluster)
    assert made.peak and all(peak.bytes <= peak.capacity for peak in made.peak.values())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_no_fewer_moves_would_do(share: float) -> None:
    plan = compile_graph("ppo", ["models.policy.train.micro_tokens=2048"], 8)
    cluster = tight(plan, H100, share)
    print_ = footprint(plan, cluster)
    order = print_.in_order()
    made, taken = _chosen_gaps(print_, order, _over_iterations)
    chosen = taken["main"]
    assert made.notes == plan.notes  # which would say that it is not proved
    room = [
        cluster.memory - print_.resident("main", set()).total() - print_.transient("main", s).total()
        for s in order
    ]
    cramped = footprint(plan, cluster.model_copy(update={"memory": 1.0}))
    every = _chosen_gaps(cramped, order, _over_iterations)[1]["main"]

    def enough(gaps: Sequence[object]) -> bool:
        return all(left + sum(g.size for g in gaps if at in g.inside) >= 0 for at, left in enumerate(room))  # type: ignore[attr-defined]

    assert enough(chosen) and {*chosen} <= {*every}
    for count in range(len(chosen)):
        assert not any(enough(some) for some in combinations(every, count))
    least = min(sum(g.size for g in some) for some in combinations(every, len(chosen)) if enough(some))
    assert sum(gap.size for gap in chosen) == least


def gap(size: int, inside: Sequence[int]) -> Gap:
    return Gap(EngineComponent(f"m{size}", "train", "parameters"), size, tuple(inside), None, None)


@examples(200)
@given(
    gaps=st.lists(st.builds(gap, st.integers(1, 40), st.sets(st.integers(0, 5), min_size=1)), max_size=9),
    room=st.lists(st.integers(-60, 20), min_size=6, max_size=6),
)
def test_the_search_finds_the_cheapest_set(gaps: list[Gap], room: list[int]) -> None:
    gaps = sorted({*gaps}, key=lambda one: -one.size)
    search = _Search(gaps)
    search.down((), frozenset(), room)
    fitting = [
        (count, sum(one.size for one in some))
        for count in range(len(gaps) + 1)
        for some in combinations(gaps, count)
        if all(left + sum(g.size for g in some if at in g.inside) >= 0 for at, left in enumerate(room))
    ]
    assert search.best is None if not fitting else search.cost == min(fitting)


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_graph("ppo", ["models.policy.train.micro_tokens=2048"], 8)
    print_ = footprint(plan, tight(plan, H100, 0.75))
    assert not reside(print_).notes
    monkeypatch.setattr(offload, "TRIES", 1)
    (note,) = reside(print_).notes
    assert note == "pool main: its moves are the best of 1 sets that were tried; fewer or smaller ones may do"


@examples(40, derandomize=False)
@given(
    graph=st.sampled_from(["ppo", "grpo", "rloo", "reinforce_pp", "dapo"]),
    devices=st.sampled_from([1, 2, 8, 16]),
    memory=st.floats(4e9, 90e9),
    model=st.sampled_from(["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B"]),
    tokens=st.sampled_from([1024, 4096, 16384]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    split=st.booleans(),
)
def test_on_any_cluster_a_plan_is_sound_or_refused(
    graph: str, devices: int, memory: float, model: str, tokens: int, dtype: str, split: bool
) -> None:
    overrides = [f"models.policy.path={model}", f"models.policy.serve.dtype={dtype}"]
    overrides += [f"models.policy.train.{key}" for key in (f"micro_tokens={tokens}", f"dtype={dtype}")]
    if split:
        overrides += [
            "pools.gen.devices=auto",
            "models.policy.serve.pool=gen",
            "models.policy.train.pool=main",
        ]
    cluster = H100.model_copy(update={"devices": 8, "hosts": 4, "memory": memory})
    plan = compile_graph(graph, overrides, devices)
    cramped = footprint(plan, cluster)
    helped = replace(cramped, plan=reside(cramped)).peaks()
    if any(peak.bytes > peak.capacity for peak in helped.values()):
        with pytest.raises(GraphError, match="does not fit"):
            predict(plan, Scenario(cluster))
    else:
        made = predict(plan, Scenario(cluster))
        assert_sound(made, cluster)
        assert all(step.because for step in moves(made))


PATHS = ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"]


@st.composite
def graphs(draw: st.DrawFn) -> str:
    """A graph with up to four judges, a reference or none, and engines on one, two or three pools."""
    pools = draw(st.sampled_from([["main"], ["main", "gen"], ["main", "gen", "third"]]))
    chosen = draw(st.lists(st.sampled_from(pools), min_size=6, max_size=6))
    where = iter([*chosen[: 6 - len(pools)], *pools])  # every pool has something on it
    judges, reference = draw(st.integers(1, 4)), draw(st.booleans())
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))

    def engine(**more: object) -> str:
        given = {"pool": next(where), "dtype": dtype, **more}
        return "{" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}"

    def path() -> str:
        return f"{draw(st.sampled_from(PATHS))}, vocabulary: one"

    tokens, again = draw(st.sampled_from([1024, 8192])), str(draw(st.booleans())).lower()
    serve, train = engine(), engine(micro_tokens=tokens, recompute=again)
    models = [f"policy: {{path: {path()}, optimizer: {{lr: 1e-6}}, serve: {serve}, train: {train}}}"]
    nodes = ["prompts: {op: data.prompts, files: [a.jsonl], batch: 64}"]
    nodes += ["rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 512}"]
    for number in range(judges):
        on = engine(micro_tokens=tokens) if number < 3 else "{}"
        models.append(f"judge{number}: {{path: {path()}, head: value, frozen: true, train: {on}}}")
        nodes.append(f"score{number}: {{op: reward.model, model: judge{number}}}")
    extra = ", ".join(f"rewards_{n + 1}: score{n}" for n in range(1, judges))
    weights = "".join(f", weight_{n + 1}: 1.0" for n in range(1, judges))
    if judges == 1:
        extra, weights = "rewards_2: score0", ", weight_2: 1.0"
    nodes.append(f"advantages: {{op: advantage.gdpo, in: {{rewards: score0, {extra}}}{weights}}}")
    nodes.append("old_logprobs: {op: logprobs, model: policy}")
    if reference:
        models.append(f"ref: {{path: {path()}, frozen: true, train: {engine(micro_tokens=tokens)}}}")
        nodes.append("ref_logprobs: {op: logprobs, model: ref}")
    kl = ", kl_coef: 0.1" if reference else ""
    nodes.append(
        f"update_policy: {{op: update.policy, model: policy, minibatches: 2, loss: {{kind: ppo_clip}}{kl}}}"
    )
    sections = {"models": models, "nodes": nodes, "pools": [f"{pool}: {{devices: auto}}" for pool in pools]}
    text = "".join(
        f"{name}:\n" + "".join(f"  {line}\n" for line in lines) for name, lines in sections.items()
    )
    return f"graph: random\nschedule: {{iterations: 1}}\n{text}"


@examples(80, derandomize=False)
@given(graphs(), st.sampled_from([1, 3, 8, 24]), st.floats(0.0, 1.0))
def test_any_graph_is_sound_on_any_cluster_that_holds_it(text: str, devices: int, share: float) -> None:
    try:
        plan = fixed(plan_tree(parse(Source("random.yaml", text)), devices))
    except GraphError as error:
        assume(all(problem.kind != "idle-pool" for problem in error.problems))
        raise
    big = H100.model_copy(update={"hosts": 8, "host_memory": None})
    cluster = tight(plan, big, share)
    made = predict(plan, Scenario(cluster))
    assert_sound(made, cluster)
    few = moves(made)
    closer = predict(plan, Scenario(tight(plan, big, min(share + 0.2, 1.0))))
    assert len(moves(closer)) <= len(few)  # more memory never asks for more moves


def test_hosts_have_to_hold_what_leaves() -> None:
    plan = compile_graph("ppo", ["models.policy.train.micro_tokens=2048"], 8)
    small = tight(plan, H100, 0.0).model_copy(update={"host_memory": 1e9})
    with pytest.raises(
        GraphError, match=r"what leaves the devices of pool main takes .* of a host, which has 1 GB"
    ):
        predict(plan, Scenario(small))


def test_the_moves_as_text(golden: Callable[[str, str], None]) -> None:
    from rlgraph.printing.plan_text import plan_text

    plan = compile_graph("ppo", ["models.policy.train.micro_tokens=2048"], 8)
    golden("plan/ppo-tight.txt", plan_text(predict(plan, Scenario(tight(plan, H100, 0.0)))))
