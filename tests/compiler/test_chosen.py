"""Settings that the planner chooses where a plan does not fit and the graph leaves them open."""

from __future__ import annotations

import io
import re

import pytest

from rlgraph.cli.search_progress import SearchProgress
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.chosen import chosen_settings
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.headline import headline
from rlgraph.search.candidate import Candidate
from rlgraph.search.fit import fastest
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle
from usual_settings import usual

MIXTURE = "models.policy.path=Qwen/Qwen3-30B-A3B"
AUTO = "models.policy.serve.tensor_parallel=auto"


def planned(*settings: str, cluster: str = "h100-16", graph: str = "grpo") -> Plan:
    return compile_graph(graph, settings, target=Target(cluster))


def test_a_plan_that_would_not_fit_has_the_fastest_setting_that_does() -> None:
    plan = planned(MIXTURE)
    chosen = chosen_settings(plan)
    assert [*chosen] == ["models.policy.serve.tensor_parallel"]
    assert plan.predicted and plan.peak and plan.peak["main"].fits
    for size in (2, 4, 8):
        given = planned(MIXTURE, f"models.policy.serve.tensor_parallel={size}")
        assert given.predicted and not chosen_settings(given)
        assert middle(plan.predicted.seconds) <= 1.05 * middle(given.predicted.seconds)
    (setting,) = overrides(chosen)
    assert f"{setting}; without" in headline(plan)["chosen"]
    assert any(note.startswith(f"chosen: {setting}, the fastest") for note in plan.notes)


def test_it_is_the_plan_of_who_types_it_and_the_same_run() -> None:
    plan = planned(MIXTURE)
    typed = planned(MIXTURE, *overrides(chosen_settings(plan)))
    assert (plan.models, plan.steps, plan.peak) == (typed.models, typed.steps, typed.peak)
    usual_plan = planned(MIXTURE, cluster="h200-16")  # where nothing has to be chosen
    assert not chosen_settings(usual_plan) and usual_plan.digest == plan.digest


def test_auto_is_as_if_nothing_were_given() -> None:
    assert chosen_settings(planned(MIXTURE, AUTO)) == chosen_settings(planned(MIXTURE))
    small = planned(AUTO, "models.policy.train.micro_tokens=auto", cluster="h100-8")
    policy = small.models["policy"]
    assert policy.serve and policy.train
    assert (policy.serve.tensor_parallel, policy.train.micro_tokens) == (1, 16384)


def test_what_the_graph_gives_stays() -> None:
    plan = planned(MIXTURE, "models.policy.serve.tensor_parallel=1")
    assert "models.policy.serve.tensor_parallel" not in chosen_settings(plan)
    with pytest.raises(GraphError, match="does not fit on h100-16") as refused:
        planned(*usual([MIXTURE]))
    lines = refused.value.problems[0].remedy.splitlines()
    assert "--autoplace" in lines[0]
    assert "models.policy.serve.tensor_parallel=4  # " in lines[1]  # the fastest, not the smallest
    assert re.match(r"  on 3 hosts, 24 devices: ", lines[-2])
    assert re.match(r"  on 1 host, 8 devices: ", lines[-1])


def test_of_equals_the_mildest_is_taken() -> None:
    candidates = [Candidate({"size": size}, None) for size in (2, 4, 8)]
    for candidate, seconds in zip(candidates, (1.04, 1.2, 1.0), strict=True):
        candidate.__dict__["seconds"] = seconds  # a cached property
    assert fastest(candidates) is candidates[0]
    assert fastest(candidates[1:]) is candidates[2]
    assert fastest([]) is None


def test_a_limit_is_named_only_where_ranges_do_not_overlap() -> None:
    near = headline(planned("models.policy.path=Qwen/Qwen2.5-7B", cluster="h100-8"))
    clear = headline(planned(graph="dapo", cluster="h100-64"))
    assert (
        "limited by" not in near
        and "(the ranges of `update_policy` and `rollout` overlap)" in near["longest"]
    )
    assert "longest" not in clear and clear["limited by"].startswith("`rollout`")


def test_the_headline_has_what_filters_keep() -> None:
    every = headline(planned(graph="dapo", cluster="h100-8"))
    third = headline(planned("informative.refill={expected: 0.25}", graph="dapo", cluster="h100-8"))
    assert "filters" not in every, "nothing follows from a filter that keeps all"
    assert third["filters"] == "`informative` keeps 25% of its rows: 4 x the rows are drawn (refill.expected)"
    assert "filters" not in headline(planned(cluster="h100-8"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress_is_in_place_on_a_terminal_and_rare_elsewhere(stream: io.StringIO) -> None:
    progress = SearchProgress(stream)
    progress(1, 641)
    assert stream.getvalue() == "", "it has only begun"
    progress.last -= 20
    progress(192, 641)
    progress(193, 641)
    said = "641 placements, 30% tried"
    if stream.isatty():
        assert stream.getvalue() == f"\r\033[K{said}"
        progress.close()
        assert stream.getvalue().endswith("\r\033[K")
    else:
        progress.close()
        assert stream.getvalue() == f"{said}\n"
