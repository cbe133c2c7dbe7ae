"""Numbers that follow a measured KL: the formula, what may be written, and what the plan says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.kl_controller import Controller
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reference.json_schema import graph_schema
from rlgraph.reports.plan_file import parse

ADAPTIVE = "{adaptive: 0.1, target: 0.05, horizon: 10000}"


def planned(*settings: str, base: str = "grpo") -> Plan:
    return compile_graph(base, settings, devices=2)


def problems(*settings: str, base: str = "grpo") -> str:
    with pytest.raises(GraphError) as caught:
        planned(*settings, base=base)
    return "\n".join(
        f"{p.law}; {p.remedy} at {p.mark.column if p.mark else 0}" for p in caught.value.problems
    )


@pytest.mark.parametrize(
    ("kl", "samples", "following"),
    [
        (6.0, 64, 0.2),  # on the target
        (6.6, 100, 0.2 * (1 + 0.1 * 0.1)),
        (5.4, 100, 0.2 * (1 - 0.1 * 0.1)),
        (60.0, 100, 0.2 * (1 + 0.2 * 0.1)),  # however far off, a fifth counts
        (0.0, 100, 0.2 * (1 - 0.2 * 0.1)),
        (-1.0, 100, 0.2 * (1 - 0.2 * 0.1)),  # an estimate may be negative
        (60.0, 1000, 0.2 * 1.2),
        (0.0, 9000, 0.2 * 0.8),  # never below 0
        (math.nan, 100, 0.2),
        (math.inf, 100, 0.2),
    ],
)
def test_the_formula(kl: float, samples: int, following: float) -> None:
    controller = Controller("kl_ref", 0.2, target=6.0, horizon=1000)
    assert controller.next(0.2, kl, samples) == pytest.approx(following, rel=1e-12)


def test_the_plan_shows_it_and_is_read_again() -> None:
    plan = planned(f"update_policy.kl_coef={ADAPTIVE}")
    function = plan.functions["train"]["update_policy"]
    controller = Controller("kl_ref", 0.1, 0.05, 10000)
    assert function.controllers == {"kl_coef": controller}
    assert function.at(7).varying == {"kl_coef": 0.1}
    assert function.at(7, {"kl_coef": 0.3}).varying == {"kl_coef": 0.3}
    assert "varies  kl_coef: 0.1, then adapts to kl_ref 0.05 over 10000 samples\n" in plan_text(plan)
    assert parse(plan.json()) == plan
    assert "ref_logprobs" in [step.node for step in plan.steps]


def test_a_penalty_in_the_reward_may_be_adaptive() -> None:
    plan = planned(f"shaped.beta={ADAPTIVE}", base="ppo")
    assert plan.functions["train"]["shaped"].controllers == {"beta": Controller("kl/ref", 0.1, 0.05, 10000)}


def test_plans_tell_of_a_changed_controller() -> None:
    old, new = (planned(f"update_policy.kl_coef={value}") for value in ("0.1", ADAPTIVE))
    lines = "\n".join(differences(old, new))
    assert "kl_coef: 0.1 -> 0.1, then adapts to kl_ref 0.05 over 10000 samples" in lines


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"update_policy.entropy_coef={ADAPTIVE}", "`update_policy.entropy_coef` can't be adaptive: nothing"),
        (f"update_policy.entropy_coef={ADAPTIVE}", "of this op kl_coef may be"),
        (f"rollout.temperature={ADAPTIVE}", "by @op(measures={'kl_coef': 'kl_ref'})"),
        (f"update_policy.loss.clip={ADAPTIVE}", "`update_policy.loss.clip` can't be adaptive"),
        (f"models.policy.optimizer.lr={ADAPTIVE}", "`models.policy.optimizer.lr` can't be adaptive"),
        ("update_policy.kl_coef={adaptive: 0.1, target: 0.05}", "is adaptive and has no `horizon`; as {ad"),
        ("update_policy.kl_coef={adaptive: 0, target: 1, horizon: 9}", "its `adaptive` is a number above 0"),
        ("update_policy.kl_coef={adaptive: 1, target: 0, horizon: 9}", "`target` is a number above 0"),
        ("update_policy.kl_coef={adaptive: 1, target: 1, horizon: true}", "`horizon` is a number above 0"),
        (
            "update_policy.kl_coef={adaptive: 1, target: 1, horizon: 9, over: 3}",
            "which takes no",
        ),
    ],
)
def test_what_is_no_controller_is_refused(setting: str, said: str) -> None:
    assert said in problems(setting)


def test_open_numbers_stay_open() -> None:
    plan = planned("update_policy.kl_coef={adaptive: 0.1, target: ???, horizon: 9}")
    assert "nodes.update_policy.kl_coef.target" in plan.open_values


OP = '''
from rlgraph.ops import Context, float32, op, samples


@op(measures={"%s": "cost"})
def dear(ctx: Context, rewards: float32[samples], *, price: float = 0.1) -> float32[samples]:
    """Rewards that cost something."""
    ctx.record("cost", rewards.abs())
    return rewards - price * rewards.abs()
'''


def test_an_op_of_ones_own_says_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "graph: mine\nextends: grpo\nedits:\n"
        f"  - insert: {{dear: {{op: 'ops.py:dear', on: rewards, price: {ADAPTIVE}}}}}\n"
    )
    Path("ops.py").write_text(OP % "price")
    function = planned(base="mine.yaml").functions["train"]["dear"]
    assert function.controllers == {"price": Controller("cost", 0.1, 0.05, 10000)}


def test_what_it_measures_names_an_attribute(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(OP % "prize")
    setting = f"rewards={{op: '{tmp_path / 'ops.py'}:dear'}}"
    with pytest.raises(GraphError, match="`measures` of @op names `prize`, which is not an attribute"):
        planned(setting)


def test_editors_take_one_where_the_op_does() -> None:
    checked = Draft202012Validator(graph_schema())

    def graph(**changes: object) -> dict[str, object]:
        update = {"op": "update.policy", "model": "policy", "loss": {"kind": "sft"}, **changes}
        return {"graph": "g", "nodes": {"update": update}, "schedule": {"iterations": 1}}

    full = {"adaptive": 0.1, "target": 0.05, "horizon": 10000}
    assert checked.is_valid(graph(kl_coef=full))
    short, none = {"adaptive": 0.1}, {**full, "target": 0}
    for refused in ({"entropy_coef": full}, {"kl_coef": short}, {"kl_coef": none}):
        assert not checked.is_valid(graph(**refused)), refused
