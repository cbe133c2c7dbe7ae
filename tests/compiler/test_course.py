"""Numbers that change over the iterations: what may be written, and what follows for the plan."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.printing.plan_diff import differences
from rlgraph.printing.plan_text import plan_text
from rlgraph.reference.json_schema import graph_schema
from rlgraph.reports.plan_file import parse
from rlgraph.view.contents import contents
from rlgraph.view.subject import Subject


def planned(*settings: str, base: str = "grpo") -> Plan:
    return compile_graph(base, settings, devices=2)


def problems(*settings: str) -> str:
    with pytest.raises(GraphError) as caught:
        planned(*settings)
    return "\n".join(
        f"{p.law}; {p.remedy} at {p.mark.column if p.mark else 0}" for p in caught.value.problems
    )


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("{linear: [0.1, 0.5], over: 4}", {1: 0.1, 2: 0.2, 3: 0.3, 5: 0.5, 9: 0.5}),
        ("{linear: [0.1, 0.5], over: 4, from: 11}", {1: 0.1, 11: 0.1, 13: 0.3, 15: 0.5}),
        ("{cosine: [1, 0], over: 4}", {1: 1, 2: 0.853553, 3: 0.5, 4: 0.146447, 5: 0}),
        ("{steps: {0: 0.1, 50: 0.05, 20: 0.2}}", {1: 0.1, 19: 0.1, 20: 0.2, 49: 0.2, 50: 0.05, 99: 0.05}),
    ],
)
def test_the_value_of_each_iteration(written: str, values: dict[int, float]) -> None:
    function = planned(f"update_policy.kl_coef={written}").functions["train"]["update_policy"]
    for iteration, value in values.items():
        assert function.at(iteration).attributes["kl_coef"] == pytest.approx(value, abs=1e-6)
        assert function.at(iteration).varying == {"kl_coef": pytest.approx(value, abs=1e-6)}
    assert function.attributes["kl_coef"] == max(values.values())


def test_steps_of_a_whole_number_are_whole() -> None:
    plan = planned("rollout.max_new_tokens={steps: {1: 512, 100: 1024}}")
    again = parse(plan.json())
    for one in (plan, again):
        function = one.functions["train"]["rollout"]
        assert [function.at(i).attributes["max_new_tokens"] for i in (1, 99, 100)] == [512, 512, 1024]
        assert all(isinstance(function.at(i).attributes["max_new_tokens"], int) for i in (1, 99, 100))
    assert again == plan


def test_each_number_of_a_mapping_has_its_course() -> None:
    files = "prompts.files={easy: [a.jsonl], hard: [b.jsonl]}"
    plan = planned(files, "prompts.weights={easy: {linear: [1, 0], over: 4}, hard: {steps: {1: 0.5, 3: 2}}}")
    again = parse(plan.json())
    assert again == plan and "varies  weights.easy: 1 to 0 over 4 iterations, linear; weights.h" in plan_text(
        plan
    )
    function = again.functions["train"]["prompts"]
    weights = [function.at(iteration).attributes["weights"] for iteration in (1, 3, 5)]
    assert weights == [{"easy": 1, "hard": 0.5}, {"easy": 0.5, "hard": 2}, {"easy": 0, "hard": 2}]
    assert function.at(3).varying == {"weights.easy": 0.5, "weights.hard": 2}
    changed = differences(planned(files, "prompts.weights={easy: 1, hard: 1}"), plan)
    assert any("weights.easy" in line for line in changed)


def test_a_plan_shows_what_changes() -> None:
    kl, clip = "kl_coef={linear: [0.1, 0], over: 100}", "loss.clip={steps: {1: 0.2, 9: 0.1}}"
    settings = [f"update_policy.{kl}", f"update_policy.{clip}"]
    plan = planned(*settings, "models.policy.optimizer.lr={cosine: [1e-6, 1e-7], over: 50, from: 10}")
    text = plan_text(plan)
    assert "varies  kl_coef: 0.1 to 0 over 100 iterations, linear; loss.clip: 0.2, 0.1 from" in text
    assert ", lr 1e-06 to 1e-07 over 50 iterations from iteration 10 on, cosine\n" in text
    (step,) = [
        s
        for s in contents(Subject(plan, compiled=True))["phases"]["train"]["steps"]
        if s["node"] == "update_policy"
    ]
    shown = {name: value for name, value, _ in step["attributes"]}
    assert shown["kl_coef"] == "0.1 to 0 over 100 iterations, linear"


def test_plans_tell_of_a_changed_course() -> None:
    lr = "models.policy.optimizer.lr={linear: [1e-6, 1e-7], over: 10}"
    clip = "update_policy.loss.clip={steps: {1: 0.2, 50: 0.1}}"
    lines = differences(planned(clip), planned("update_policy.kl_coef={linear: [0.1, 0.0], over: 100}", lr))
    assert "model policy: rate: null -> 1e-06 to 1e-07 over 10 iterations, linear" in lines
    assert "             kl_coef: 0.001 -> 0.1 to 0.0 over 100 iterations, linear" in lines
    assert "             loss.clip: 0.2, 0.1 from iteration 50 -> 0.2" in lines


def test_a_coefficient_that_ends_at_nothing_is_read_all_the_time() -> None:
    for ends in ("[0.1, 0]", "[0, 0.1]"):
        plan = planned(f"update_policy.kl_coef={{linear: {ends}, over: 100}}")
        assert "ref_logprobs" in [step.node for step in plan.steps]
    assert "ref_logprobs" not in [
        step.node for step in planned("update_policy.kl_coef={steps: {1: 0}}").steps
    ]


def test_who_scores_follows_the_temperature_of_the_rollout() -> None:
    functions = planned("rollout.temperature={linear: [1.0, 0.6], over: 10}").functions["train"]
    for node in ("rollout", "old_logprobs", "ref_logprobs", "update_policy"):
        assert functions[node].courses == {"temperature": ValueSchedule("linear", ((1, 1.0), (11, 0.6)))}
    said = problems("rollout.temperature={steps: {1: 1, 9: 0.5}}", "old_logprobs.temperature=1.0")
    assert (
        "node `old_logprobs` scores at temperature 1.0; `rollout` sampled at 1, 0.5 from iteration 9" in said
    )
    assert "let rollout.temperature stay above 0" in problems("rollout.temperature={linear: [1, 0], over: 9}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("update_policy.kl_coef={linear: [0.1, -0.1], over: 5}", "must be at least 0; it is -0.1;  at 38"),
        ("update_policy.kl_coef={linear: [-0.2, 0.1], over: 5}", "must be at least 0; it is -0.2"),
        (
            "rollout.top_p={steps: {1: 0.9, 5: 1.5}}",
            "`rollout.top_p` must be less than or equal to 1; it is 1.5",
        ),
        (
            "update_policy.loss.clip={cosine: [0.2, 0], over: 5}",
            "`update_policy.loss.clip` must be greater than 0",
        ),
        ("rollout.top_k={linear: [1, 9], over: 5}", "is a whole number, and changes in steps alone"),
        ("rollout.top_k={steps: {1: 1.5}}", "`rollout.top_k` must be a whole number"),
        ("rollout.n={steps: {1: 4}}", "`rollout.n` is one number for the whole run"),
        ("update_policy.minibatches={steps: {1: 4}}", "is one number for the whole run"),
        ("prompts.batch={steps: {1: 4}}", "is one number for the whole run"),
        ("models.policy.optimizer.eps={linear: [1, 2], over: 3}", "is one number for the whole run"),
        ("update_policy.kl_coef={linear: [0.1, 0], for: 5}", "which takes no `for`; as {linear:"),
        ("update_policy.kl_coef={linear: [0.1, 0]}", "changes `over` a number of iterations, 1 or more"),
        ("update_policy.kl_coef={linear: [0.1], over: 5}", "changes by `linear` from one number to another"),
        (
            "update_policy.kl_coef={linear: [0.1, a], over: 5}",
            "changes by `linear` from one number to another",
        ),
        ("update_policy.kl_coef={linear: [0.1, 0], over: 0}", "changes `over` a number of iterations"),
        ("update_policy.kl_coef={steps: {5: 0.1}}", "none of them is for iteration 1"),
        ("update_policy.kl_coef={steps: [1, 2]}", "has steps, which are `iteration: value`"),
        ("update_policy.kl_coef={steps: {1: 0.1}, linear: [1, 0]}", "takes no `steps`"),
        ("update_policy.kl={steps: {1: 3}}", "`update_policy.kl` must be"),
    ],
)
def test_what_is_no_course_is_refused(setting: str, said: str) -> None:
    assert said in problems(setting)


def test_one_learning_rate_has_one_schedule() -> None:
    lr = "models.policy.optimizer.lr={linear: [1e-5, 1e-6], over: 10}"
    cosine = "models.policy.optimizer.schedule=cosine"
    assert "has an `lr` that changes, and `schedule: cosine`" in problems(lr, cosine)
    model = planned(lr, "models.policy.optimizer.warmup_steps=5").models["policy"]
    assert model.optimizer and model.rate
    assert (model.optimizer.lr, model.rate.at(6)) == (1e-5, pytest.approx(5.5e-6))


def test_open_ends_stay_open() -> None:
    plan = planned("update_policy.kl_coef={linear: [0.1, ???], over: 100}")
    assert "nodes.update_policy.kl_coef.linear.1" in plan.open_values


def test_memory_is_planned_for_the_longest_responses() -> None:
    target = Target("h100-8", response_tokens=400)
    fixed = compile_graph("grpo", ["rollout.max_new_tokens=2048"], target=target)
    grows = compile_graph("grpo", ["rollout.max_new_tokens={steps: {1: 512, 100: 2048}}"], target=target)
    assert fixed.peak == grows.peak


def test_editors_take_a_course_where_a_number_is_taken() -> None:
    schema = graph_schema()
    checked = Draft202012Validator(schema)

    def graph(**changes: object) -> dict[str, object]:
        update = {"op": "update.policy", "model": "policy", "loss": {"kind": "sft"}, **changes}
        return {"graph": "g", "nodes": {"update": update}, "schedule": {"iterations": 1}}

    fall = {"linear": [0.1, 0.0], "over": 100}
    for accepted in ({"kl_coef": fall}, {"temperature": {"steps": {"1": 1.0}}}, {"every": 4, "from": 2}):
        assert checked.is_valid(graph(**accepted)), accepted
    for refused in ({"kl_coef": {"linear": [0.1]}}, {"kl_coef": {}}, {"minibatches": fall}, {"every": 0}):
        assert not checked.is_valid(graph(**refused)), refused
    files = {"op": "data.prompts", "files": {"a": ["a.jsonl"]}, "batch": 8}
    for weight, accepted in ((1, True), (fall, True), ({"linear": [1]}, False), ("much", False)):
        prompts = {**files, "weights": {"a": weight}}
        assert checked.is_valid({**graph(), "nodes": {"prompts": prompts}}) == accepted, weight
    model = {"path": "m", "optimizer": {"lr": {"cosine": [1e-5, 1e-6], "over": 9}}}
    assert checked.is_valid({**graph(), "models": {"policy": model}})
