"""The search over layouts: never worse than the default, close to the best, and honest about the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlgraph.autoplace import autoplace
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.hardware import FOLDER
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.ir.plan import Plan, Target
from rlgraph.lowering import plan_tree
from rlgraph.planning.predict import Scenario, predict
from rlgraph.reports.plan_file import load
from rlgraph.request import PlanRequest
from rlgraph.search import goals
from rlgraph.search.candidate import Candidate
from rlgraph.search.layout import PoolLayout
from rlgraph.search.layout_search import layouts, search
from rlgraph.search.text import contest_text
from rlgraph.syntax.yaml_text import overrides
from usual_settings import usual

SEVEN = ["models.policy.path=Qwen/Qwen2.5-7B", "models.policy.serve.dtype=bfloat16"]
SEVEN += [f"models.{name}.train.dtype=bfloat16" for name in ("policy", "ref")]
SEVEN += ["models.policy.serve.engine=transformers"]  # which has no groups: fewer layouts to try
APART = [setting for setting in SEVEN if not setting.startswith("models.ref.")]  # of decoupled_ppo


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.fixture(autouse=True, params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cluster, and how much of what it allows is tried: on 8 devices by day, on 16 by night."""
    large = request.param == "all"
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (4096, 16384) if large else (16384,))
    monkeypatch.setattr("rlgraph.search.layout_search.COARSE", 8 if large else 4)
    if not large:
        return "h100-8"
    path = tmp_path / "sixteen.yaml"
    path.write_text(
        (FOLDER / "h100-8.yaml").read_text().replace("hosts: 1", "hosts: 2").replace("h100-8", "h100-16")
    )
    return str(path)


def seconds(plan: Plan) -> float:
    assert plan.predicted
    return math.sqrt(math.prod(plan.predicted.seconds))


@pytest.mark.parametrize("graph", ["grpo", "decoupled_ppo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_it_is_never_worse_than_the_graph_as_it_is(graph: str, cluster: str) -> None:
    default = compile_graph(graph, target=Target(cluster))
    found, compilation = autoplace(PlanRequest(graph, (), target=Target(cluster)))
    best = compilation.plan
    assert seconds(best) <= seconds(default) + 1e-9
    assert any(candidate.layout is None and candidate.fits for candidate in found)
    assert seconds(best) == pytest.approx(found[0].seconds)


def test_a_pool_that_takes_hosts_whole_takes_whole_ones(cluster: str) -> None:
    there = load_cluster(cluster)
    whole = f"pools={{main: {{hosts: {there.hosts}, devices: {there.total}}}}}"
    found, compilation = autoplace(PlanRequest("grpo", [*SEVEN, whole], target=Target(cluster)))
    best = compilation.plan
    fit = [candidate.settings["pools"] for candidate in found if candidate.fits and candidate.layout]
    assert {"main": {"devices": there.total, "hosts": there.hosts}} in fit
    assert all(p["devices"] == p["hosts"] * there.devices for pools in fit for p in pools.values())
    split = next(candidate for candidate in found if candidate.layout and candidate.layout.generating == 4)
    assert "takes 1 whole hosts (pools." in split.why_not
    assert best.origin and all(pool["hosts"] for pool in best.origin.composed["pools"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("cluster", ["all"], indirect=True)
def test_it_is_close_to_trying_everything(cluster: str) -> None:
    graph, target = "decoupled_ppo", Target(cluster)
    found, _ = autoplace(PlanRequest(graph, APART, target=target))
    total = load_cluster(cluster).total
    plan = compile_graph(graph, APART, total)
    every = list(layouts(plan, range(total), 8))
    tried = [candidate.layout for candidate in found if candidate.layout in every]  # others divide rows, too
    assert 0 < len(tried) < 0.7 * len(every)
    best = math.inf
    for layout in every:
        try:
            made = compile_graph(graph, [*APART, *overrides(layout.settings(plan, total))], target=target)
        except GraphError:
            continue
        best = min(best, seconds(made))
    assert found[0].seconds <= 1.1 * best


def test_pools_get_what_they_need(cluster: str) -> None:
    # a rollout of long answers wants more devices than one of short ones
    shares = []
    for tokens in (16, 4000):
        given = [*APART, "rollout.max_new_tokens=8000"]
        found, _ = autoplace(
            PlanRequest("decoupled_ppo", given, target=Target(cluster, response_tokens=tokens))
        )
        assert found[0].layout
        shares.append(found[0].layout.generating)
    assert shares[0] < shares[1]


def test_staleness_is_what_makes_pools_apart_pay() -> None:
    together, _ = autoplace(PlanRequest("grpo", (), target=Target("h100-8")))
    apart, _ = autoplace(PlanRequest("decoupled_ppo", (), target=Target("h100-8")))
    assert together[0].layout and apart[0].layout
    assert together[0].layout.generating == 0 < apart[0].layout.generating


def test_what_does_not_fit_says_so(cluster: str) -> None:
    found, compilation = autoplace(PlanRequest("grpo", SEVEN, target=Target(cluster)))
    best = compilation.plan
    short = [candidate for candidate in found if not candidate.fits]
    assert short and all(candidate.why_not for candidate in short)
    assert best.peak and all(peak.bytes <= peak.capacity for peak in best.peak.values())


def test_where_nothing_fits_the_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="grpo does not fit on cpu"):
        autoplace(PlanRequest("grpo", ["models.policy.path=Qwen/Qwen2.5-72B"], target=Target("cpu")))


def test_groups_are_tried_where_an_engine_has_them() -> None:
    plan = compile_graph("grpo", ["models.policy.serve.engine=sglang"], 8)
    assert {layout.group for layout in layouts(plan, [0], 8)} == {1, 2, 4, 8}
    assert {layout.group for layout in layouts(plan, [0], 6)} == {1, 2}
    assert {layout.group for layout in layouts(compile_graph("grpo", (), 8), [0], 8)} == {1}


def test_micro_batches_of_one_row_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (2048, 4096, 8192, 16384))
    monkeypatch.setattr("rlgraph.search.layout_search.COARSE", 1)
    given = [*SEVEN, "rollout.max_new_tokens=16000"]
    plan, scenario = compile_graph("grpo", given, 8, device="cuda"), Scenario(load_cluster("h100-8"))

    def evaluate(settings: Mapping[str, Any]) -> Candidate:
        tree = compose("grpo", [*given, *overrides(settings)])
        return Candidate(settings, predict(plan_tree(tree, 8, "cuda"), scenario, must_fit=False))

    every, fewer = search(plan, 8, 8, evaluate), search(plan, 8, 8, evaluate, row=8256)
    assert len(fewer) < len(every)
    assert (fewer[0].layout, fewer[0].seconds) == (every[0].layout, every[0].seconds)


def test_the_best_is_compared_with_each_other_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (4096, 16384))
    found, _ = autoplace(PlanRequest("grpo", SEVEN, target=Target("h100-8")))
    said = contest_text(found)
    best = found[0].layout
    assert best and (best.micro, best.recompute) == (4096, False)
    again = next(one.seconds for one in found if one.layout == replace(best, recompute=True))
    assert f"the same with activations computed again: {again / found[0].seconds:.2f} x the time" in said
    assert "the same with micro-batches of 16,384 tokens: main needs 129 GB of 80 GB" in said
    assert "the same with rows over 2 devices: " in said
    assert "the same with servers" not in said  # this engine has no groups


def test_devices_share_rows_that_one_cannot_hold() -> None:
    long = ["models.policy.path=Qwen/Qwen3-8B", "rollout.max_new_tokens=200000", "prompts.batch=8"]
    long.append("models.policy.serve.engine=transformers")
    with pytest.raises(GraphError) as refused:
        compile_graph("dr_grpo", usual(long), target=Target("h100-8"))
    assert "models.policy.train.sequence_parallel=4" in refused.value.problems[0].remedy
    found, compilation = autoplace(PlanRequest("dr_grpo", long, target=Target("h100-8")))
    best = compilation.plan
    assert best.models["policy"].train and best.models["policy"].train.sequence_parallel > 1
    assert found[0].layout and found[0].layout.sequence and found[0].fits
    others = [one for one in found if not (one.layout and (one.layout.sequence or one.layout.host))]
    assert not any(candidate.fits for candidate in others)


def test_a_doubling_that_does_not_fit_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.search.layout_search.MICRO", (4096,))
    paths = [f"models.{name}.path=Qwen/Qwen2.5-7B" for name in ("policy", "ref")]
    found, compilation = autoplace(
        PlanRequest("grpo", [*paths, "rollout.max_new_tokens=16000"], target=Target("h100-4", None, 8000))
    )
    best = compilation.plan
    kept = [one for one in found if one.layout and one.layout.sequence and not one.layout.recompute]
    assert {one.layout.sequence for one in kept if one.layout and not one.fits} == {2}
    policy = best.models["policy"].train  # with recompute, rows over 2 devices fit and are no gain
    assert policy and policy.sequence_parallel == 4 and not policy.recompute


@pytest.mark.slow
def test_the_command_prints_a_table_and_saves_the_best(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = call("plan", "grpo", "--cluster", "h100-8", "--autoplace", *SEVEN, "-o", str(path))
    assert said.exit_code == 0, said.output
    assert "placements tried" in said.output and "why the others lost" in said.output
    plan = load(path)
    assert plan.origin and plan.origin.target == Target("h100-8")
    assert any(setting.startswith("pools=") for setting in plan.origin.overrides)
    settings = [s for s in said.output.split("the first, as settings")[1].split() if "=" in s]
    assert settings


@pytest.mark.parametrize("options", ["", "--devices 8", "--cluster h100-8 --devices 8"])
def test_it_needs_a_cluster(options: str) -> None:
    assert call("plan", "grpo", "--autoplace", *options.split()).exit_code == 2


def test_candidates_that_fit_come_first() -> None:
    plan = compile_graph("grpo", target=Target("h100-8"))
    fits = Candidate({}, plan)
    broken = Candidate({}, None, "no", layout=PoolLayout(0, frozenset(), 1, 2048, False))
    assert sorted([broken, fits], key=goals.fit)[0] is fits
