"""What would make a plan fit: found where there is one, it works as it is typed, and says its price."""

from __future__ import annotations

import re

import pytest

from rlgraph.autoplace import autoplace
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.request import PlanRequest
from rlgraph.search.text import contest_text
from rlgraph.units import middle, range_text
from usual_settings import usual

NARROW = [f"models.policy.{engine}.dtype=bfloat16" for engine in ("train", "serve")]
WIDE = [f"models.policy.{engine}.dtype=float32" for engine in ("train", "serve")]
SEVEN = ["models.policy.path=Qwen/Qwen2.5-7B", "models.policy.train.recompute=false"]
LARGE = ["prompts.batch=1024", "models.policy.train.recompute=true", *NARROW]


def offered(given: list[str], cluster: str, graph: str = "grpo") -> list[tuple[str, str]]:
    """The changes that a refusal offers, each with its price."""
    with pytest.raises(GraphError) as refused:
        compile_graph(graph, usual(given), target=Target(cluster))
    head, *lines = refused.value.problems[0].remedy.splitlines()
    assert head == "what would make it fit (--autoplace tries other pools as well):"
    changes = [line for line in lines if not line.startswith("  on ")]
    found = [re.fullmatch(r"    (?:or )?(.+)  # (.+) per iteration", line) for line in changes]
    assert all(found)
    return [(one[1], one[2]) for one in found if one]


def typed(change: str, given: list[str], cluster: str, graph: str = "grpo") -> Plan:
    """The plan with a change as it is typed; more devices are another cluster."""
    count = re.match(r"(\d+) devices(?: with )?", change)
    name = f"{cluster.partition('-')[0]}-{count[1]}" if count else cluster
    settings = change[count.end() :] if count else change
    return compile_graph(graph, [*given, *settings.split()], target=Target(name))


# what a newcomer met (each was refused with no, or another, remedy): graph's settings, cluster, what is among
# those offered on the same devices
CASES = {
    "7B in float32": ([*SEVEN, *WIDE], "h100-8", "dtype=bfloat16"),
    "72B served by one GPU each": (
        ["models.policy.path=Qwen/Qwen2.5-72B", *NARROW],
        "h100-64",
        "models.policy.serve.tensor_parallel=8",
    ),
    "72B served by two": (
        ["models.policy.path=Qwen/Qwen2.5-72B", *NARROW, "models.policy.serve.tensor_parallel=2"],
        "h100-64",
        "models.policy.serve.tensor_parallel=8",
    ),
    "a mixture of 30B on a host": (
        ["models.policy.path=Qwen/Qwen3-30B-A3B", *LARGE],
        "h100-8",
        "models.policy.serve.tensor_parallel=2",
    ),
    "32B on a host": (
        ["models.policy.path=Qwen/Qwen2.5-32B", *LARGE],
        "h100-8",
        "models.policy.train.optimizer_offload=true",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_offered_works_and_takes_what_it_says(case: str) -> None:
    given, cluster, expected = CASES[case]
    changes = offered(given, cluster)
    same = [change for change, _ in changes if "devices" not in change]
    assert same and any(expected in change for change in same)
    assert [*map(len, changes)] and all("recompute=false" not in change for change, _ in changes)
    seconds = []
    for change, price in changes:
        plan = typed(change, given, cluster)
        assert plan.predicted and all(peak.fits for peak in (plan.peak or {}).values())
        assert range_text(plan.predicted.seconds) == price
        engines = (
            engine for model in plan.models.values() for engine in (model.train, model.serve) if engine
        )
        assert all(engine.dtype == "bfloat16" for engine in engines)
        seconds.append(middle(plan.predicted.seconds))
    assert seconds[: len(same)] == sorted(seconds[: len(same)])


def test_no_lever_is_pulled_for_nothing() -> None:
    given, cluster, _ = CASES["32B on a host"]
    change = offered(given, cluster)[0][0].split()
    assert len(change) > 1
    for left in change:
        fewer = [one for one in change if one != left]
        with pytest.raises(GraphError, match="does not fit"):
            compile_graph("grpo", usual([*given, *fewer]), target=Target(cluster))


def test_a_cache_that_the_graph_gives_may_be_smaller() -> None:
    given = ["models.policy.path=Qwen/Qwen3-8B", "models.policy.serve.cache_tokens=900000"]
    assert any("models.policy.serve.cache_tokens=225000" in change for change, _ in offered(given, "h100-8"))


@pytest.mark.slow
def test_devices_are_offered_where_none_of_a_cluster_is_enough() -> None:
    changes = offered(["models.policy.path=Qwen/Qwen2.5-72B", *NARROW], "h100-8")
    assert any(re.match(r"\d+ devices", change) for change, _ in changes)


@pytest.mark.slow
def test_more_devices_are_offered_with_the_sizes_of_pools_that_the_graph_fixes() -> None:
    given = ["models.policy.path=Qwen/Qwen2.5-72B", *NARROW, "pools={main: {devices: 8}}"]
    change, price = next(offer for offer in offered(given, "h100-8") if "devices with" in offer[0])
    assert change.endswith(" pools.main.devices=16")
    plan = typed(change, given, "h100-8")
    assert plan.pools == {"main": 16} and plan.predicted
    assert range_text(plan.predicted.seconds) == price


def test_a_search_in_which_nothing_fits_refuses_the_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (16384,))
    monkeypatch.setattr("rlgraph.search.layout_search.COARSE", 1)
    given = ["models.policy.path=Qwen/Qwen2.5-72B", "models.policy.train.recompute=true"]
    with pytest.raises(GraphError) as plain:
        compile_graph("grpo", given, target=Target("h100-1"))
    with pytest.raises(GraphError) as searched:
        autoplace(PlanRequest("grpo", given, target=Target("h100-1")))
    assert str(searched.value) == str(plain.value)


def test_layouts_that_differ_in_name_only_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (16384, 2**20, 2**21))
    found, _ = autoplace(PlanRequest("sft", ["examples.batch=8"], target=Target("h100-8")))
    best = [one for one in found if one.fits and one.plan and one.plan.predicted]
    same = {(one.seconds, tuple(p.bytes for p in (one.plan.peak or {}).values())) for one in best if one.plan}
    assert len(same) < len(best)  # whole batches in one pass, whatever else it could hold
    table = contest_text(found).partition("why the others lost")[0].partition("the first, as settings")[0]
    rows = [line for line in table.splitlines() if re.match(r"\s*\d+\.", line)]
    assert len(rows) == min(len(same), 5)
