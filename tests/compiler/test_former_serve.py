"""Plans that an older rlgraph saved, with an engine's settings in `serve` itself, are still run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, checksum
from rlgraph.lowering import digest
from rlgraph.printing.plan_diff import differences
from rlgraph.reports.former_plans import present_override
from rlgraph.reports.plan_file import compile_again, load
from rlgraph.runtime.rundir.changes import changes
from rlgraph.syntax.former_keys import present_graph
from rlgraph.syntax.source import Tree

SETTINGS = (
    "models.policy.path=Qwen/Qwen3-8B",
    "models.ref.path=Qwen/Qwen3-8B",
    "models.policy.serve.engine=sglang",
    "models.policy.serve.sglang.restarts=1",
    "models.policy.serve.sglang.options={attention_backend: fa3}",
)


def as_older(plan: Plan) -> dict[str, Any]:
    """Return a plan's JSON as it was when no engine had a section."""
    fields = json.loads(plan.json().replace("serve.sglang.", "serve."))
    serve = fields["origin"]["composed"]["models"]["policy"]["serve"]
    serve |= serve.pop("sglang")
    return {**fields, "checksum": checksum(fields)}


def test_a_plan_with_settings_where_they_were_is_read_and_run(tmp_path: Path) -> None:
    plan = compile_graph("grpo", SETTINGS, devices=2)
    older = as_older(plan)
    assert "sglang" not in older["origin"]["composed"]["models"]["policy"]["serve"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(older))
    assert load(path).origin == plan.origin
    assert differences(compile_again(path).plan, plan) == []


def test_a_run_with_settings_where_they_were_goes_on() -> None:
    plan = compile_graph("grpo", SETTINGS, devices=2)
    assert changes(Path("run"), as_older(plan), plan) == []
    other = compile_graph("grpo", (*SETTINGS, "models.policy.serve.sglang.restarts=5"), devices=2)
    (change,) = changes(Path("run"), as_older(plan), other)
    assert str(change) == "models.policy.serve.sglang.restarts: 1 -> 5"


def test_a_graph_has_the_digest_that_it_had() -> None:
    plan = compile_graph("grpo", SETTINGS, devices=2)
    assert plan.origin
    composed = as_older(plan)["origin"]["composed"]
    assert digest(Tree.of(composed)) == digest(Tree.of(plan.origin.composed)) == plan.digest


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ("models.policy.serve.hosts=2", "models.policy.serve.sglang.hosts=2"),
        ("models.policy.serve.options.tag=a", "models.policy.serve.sglang.options.tag=a"),
        ("models.judge.serve.request_retries=2", "models.judge.serve.openai.request_retries=2"),
        ("models.judge.serve.restarts=2", "models.judge.serve.sglang.restarts=2"),  # it decided nothing
        (
            "models.policy={path: a, serve: {hosts: 2}}",
            "models.policy={path: a, serve: {sglang: {hosts: 2}}}",
        ),
        ("models.policy.serve.max_rows=2", "models.policy.serve.max_rows=2"),
        ("models.policy.train.expert_parallel=2", "models.policy.train.expert_parallel=2"),
        ("rollout.n=2", "rollout.n=2"),
        ("use=[a.yaml]", "use=[a.yaml]"),
    ],
)
def test_an_override_goes_where_its_setting_is(older: str, now: str) -> None:
    assert present_override(older, {"judge": "openai"}) == now


@pytest.mark.parametrize(
    "graph", [{}, {"models": None}, {"models": {"a": None}}, {"models": {"a": {"serve": 1}}}]
)
def test_a_graph_without_such_settings_stays(graph: dict[str, Any]) -> None:
    assert present_graph(graph) == graph


def test_a_remedy_is_an_edit_that_mends_the_graph() -> None:
    with pytest.raises(GraphError) as caught:
        compile_graph("grpo", ["models.policy.serve.engine=sglang", "models.policy.serve.hosts=2"])
    assert "set: {models.policy.serve.sglang.hosts: 2}" in str(caught.value)
