"""A plan saved as JSON reads back as the same plan, or says what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan, checksum
from rlgraph.ir.prediction import Peak, Prediction
from rlgraph.reports.plan_file import (
    check_inline,
    compilation_of,
    compile_again,
    is_plan,
    load,
    parse,
    plan_schema,
)
from rlgraph.request import PlanRequest
from share import examples, rest_nightly

SCHEMA = plan_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
PPO = compile_graph("ppo", ["prompts.files=[a.jsonl]"], devices=2)
OWN = "graph: own\nextends: demo\nedits:\n  - set: {rollout.n: 4}\n"
ANY = st.none() | st.booleans() | st.integers(-1, 3) | st.text(max_size=3) | st.just([]) | st.just({})


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graph ``own.yaml`` and its plan ``plan.json``, for two devices, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(OWN)
    assert (
        call("plan", "own.yaml", "rollout.temperature=0.5", "--devices", "2", "-o", "plan.json").exit_code
        == 0
    )
    return Path("plan.json")


@pytest.mark.parametrize(
    ("name", "devices"),
    rest_nightly(
        product(shipped_graphs(), [1, 2, 3, 4]), lambda name, devices: devices == 2 or name == "ppo"
    ),
)
def test_what_is_written_reads_back_as_the_same_plan(name: str, devices: int) -> None:
    plan = compile_graph(name, devices=devices)
    again = parse(plan.json())
    assert again == plan and again.json() == plan.json()
    assert not [*VALIDATOR.iter_errors(json.loads(plan.json()))]


def test_it_remembers_what_it_was_made_from(own: Path) -> None:
    origin = load(own).origin
    assert origin is not None
    assert (origin.graph, origin.overrides, origin.devices) == ("own.yaml", ("rollout.temperature=0.5",), 2)
    assert origin.composed["nodes"]["rollout"]["temperature"] == 0.5
    plan = compile_again(own).plan
    assert plan == load(own)


def test_predictions_read_back_and_are_run_with(own: Path) -> None:
    plan = load(own)
    steps = tuple(replace(step, seconds=(0.5, 1.0), bytes=3) for step in plan.steps)
    prediction = Prediction("h100-8", (1.0, 2.0), {"main": (1.0, 1.5)}, ("so",), {"rollout": (8, 2)})
    peak = {"main": Peak(1, 2, "rollout", {"weights": 1})}
    plan = replace(plan, steps=steps, peak=peak, predicted=prediction)
    own.write_text(plan.json())
    assert load(own) == compile_again(own).plan == plan
    assert VALIDATOR.is_valid(json.loads(plan.json()))


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    """PPO's plan after a change to its JSON, its checksum right again."""
    data = json.loads(PPO.json())
    change(data)
    return json.dumps({**data, "checksum": checksum(data)} if "checksum" in data else data)


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (lambda d: d.update(version=2), "x.json is a plan of version 2; this rlgraph reads 1"),
        (lambda d: d.update(version="1"), 'a plan of version "1"'),
        (lambda d: d.pop("version"), "x.json is not a plan of rlgraph"),
        (lambda d: d.pop("seed"), "`seed` is missing"),
        (lambda d: d.pop("origin"), "`origin` is missing"),
        (lambda d: d["steps"][1].pop("op"), "`steps[1].op` is missing"),
        (lambda d: d["steps"][2].pop("node"), "`steps[2].node` is missing"),
        (lambda d: d["steps"][0].update(gpu=1), "`steps[0].gpu` is not a field of a plan"),
        (lambda d: d.update(more=1), "`more` is not a field of a plan"),
        (lambda d: d["steps"][0].update(id="1"), "`steps[0].id`: input should be a valid integer"),
        (lambda d: d["models"].update(policy=3), "`models.policy`"),
        (
            lambda d: d["functions"]["train"]["update_policy"]["hooks"]["loss"].pop("target"),
            "loss.target` is",
        ),
        (lambda d: [step.pop("id") for step in d["steps"]], "and "),
        (lambda d: d.pop("checksum"), "was changed after rlgraph wrote it"),
    ],
)
def test_a_wrong_plan_is_refused(change: Callable[[dict[str, Any]], Any], law: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse(changed(change), "x.json")
    (problem,) = caught.value.problems
    assert law in problem.law and "x.json" in problem.law
    assert "plan again: rlgraph plan" in problem.remedy


def test_a_plan_changed_by_hand_is_refused_and_one_laid_out_anew_is_not() -> None:
    data = json.loads(PPO.json())
    assert parse(json.dumps(dict(reversed(data.items())), indent=4)) == PPO
    data["functions"]["train"]["rollout"]["attributes"]["n"] = 5
    with pytest.raises(
        GraphError, match=r"plan again: rlgraph plan ppo 'prompts.files=\[a.jsonl\]' --devices 2"
    ):
        parse(json.dumps(data))


@pytest.mark.parametrize("size", [0, 1, 300, -3])
def test_half_a_plan_is_refused_at_its_end(size: int) -> None:
    with pytest.raises(
        GraphError, match=r"x.json:\d+:\d+: the plan is cut short, or is not valid JSON"
    ) as caught:
        parse(PPO.json()[:size], "x.json")
    assert "plan again" in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "{}", '{"version": 1}', "[" * 100_000])
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(GraphError, match=r"not a plan|not valid JSON"):
        parse(text, "x.json")


@examples(60)
@given(data=st.data())
def test_any_one_change_is_found(data: st.DataObject) -> None:
    plan = json.loads(PPO.json())
    place: Any = plan
    while True:
        key = data.draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    value = data.draw(ANY)
    if json.dumps(place[key]) != json.dumps(value):
        place[key] = value
        with pytest.raises(GraphError):
            parse(json.dumps(plan))


def test_the_file_and_the_format_follow_the_ending(own: Path) -> None:
    assert json.loads(own.read_text())["graph"] == "own"
    call("plan", "demo", "--devices", "1", "--format", "text", "-o", "text.json")
    assert Path("text.json").read_text().startswith("plan of demo")
    assert (
        call("plan", "own.yaml", "rollout.temperature=0.5", "--devices", "2").stdout
        == call("plan", str(own)).stdout
    )
    assert call("plan", str(own), "--format", "json").stdout == own.read_text()


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("args", [("rollout.n=2",), ("--devices", "2")])
def test_a_plan_goes_with_no_settings(own: Path, command: str, args: tuple[str, ...]) -> None:
    result = call(command, str(own), *args)
    assert result.exit_code == 2 and not result.stdout
    assert "plan.json is a saved plan: its overrides, devices and cluster are settled" in result.stderr
    with pytest.raises(RunError, match=r"are settled"):
        compilation_of(PlanRequest(str(own), ["rollout.n=2"]), inline=False)


def test_a_graph_may_be_json_and_is_none(own: Path) -> None:
    Path("graph.json").write_text('{"graph": "g", "extends": "demo"}')
    assert is_plan(str(own)) and not is_plan("graph.json") and not is_plan("nowhere.json")
    assert call("plan", "graph.json", "--devices", "1").stdout.startswith("plan of g")
    assert not {"nodes", "extends"} & {field.name for field in fields(Plan)}
    own.write_text(own.read_text()[:100])
    assert is_plan(str(own))


def test_it_is_refused_after_its_graph_was_edited(own: Path) -> None:
    Path("own.yaml").write_text(OWN.replace("rollout.n: 4", "rollout.n: 8, schedule.iterations: 3"))
    with pytest.raises(RunError) as caught:
        compile_again(own)
    assert str(caught.value).splitlines() == [
        "plan.json is not run: the graph that it was made from, own.yaml, has changed",
        "  set      rollout.n: 4 -> 8",
        "  set      schedule.iterations: 400 -> 3",
        "  undo that, or plan again: rlgraph plan own.yaml rollout.temperature=0.5 --devices 2 -o plan.json",
    ]


def test_what_it_is_about_may_change(own: Path) -> None:
    Path("own.yaml").write_text(f"{OWN}about: something else\n")
    compile_again(own)


def test_a_number_of_the_environment_is_part_of_it_and_a_text_is_not(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "rollout.n: '${env:COUNT}', models.policy.path: '${env:WEIGHTS}'"
    Path("own.yaml").write_text(OWN.replace("rollout.n: 4", more))
    monkeypatch.setenv("WEIGHTS", "a")
    monkeypatch.setenv("COUNT", "4")
    call("plan", "own.yaml", "-o", "plan.json")
    monkeypatch.setenv("WEIGHTS", "b")
    assert compile_again(own).plan.models["policy"].path == "${env:WEIGHTS}"
    monkeypatch.setenv("COUNT", "8")
    with pytest.raises(RunError, match=r"own.yaml gives another plan now"):
        compile_again(own)
    monkeypatch.delenv("WEIGHTS")
    with pytest.raises(RunError, match=r"the environment has no `WEIGHTS`"):
        compile_again(own)


def test_it_is_refused_when_its_graph_is_gone_or_wrong(own: Path) -> None:
    Path("own.yaml").write_text(OWN.replace("rollout.n", "rolout.n"))
    with pytest.raises(
        RunError, match=r"which can't be planned now.*\n.*own.yaml:4.*\n(.*\n)*.*did you mean"
    ):
        compile_again(own)
    Path("own.yaml").unlink()
    with pytest.raises(
        RunError, match=r"plan.json was made from own.yaml, which can't.*\n  no graph `own.yaml`"
    ):
        compile_again(own)


def test_it_is_refused_when_an_op_of_its_own_was_changed(own: Path) -> None:
    body = "from rlgraph.ops import float32, op, samples, text\n\n\n@op()\n"
    body += "def mine(responses: text[samples]) -> float32[samples]:\n    return responses\n"
    Path("ops.py").write_text(body)
    Path("own.yaml").write_text(
        "graph: own\nextends: demo\nedits:\n  - replace: {rewards: {op: 'ops.py:mine'}}\n"
    )
    command = [sys.executable, "-m", "rlgraph", "plan", "own.yaml", "--devices", "1", "-o", "plan.json"]
    subprocess.run(command, check=True)  # an op's file is read once a process
    Path("ops.py").write_text(body.replace("[samples])", "[samples], answer: text[samples])"))
    with pytest.raises(RunError, match=r"own.yaml gives another plan now\n(.*\n)*.*reads answer.* as well"):
        compile_again(own)


TYPED = """
from enum import Enum
from pathlib import Path
from rlgraph.ops import float32, op, samples, text

class Way(Enum):
    SUM = "sum"

@op()
def mine(
    responses: text[samples],
    *,
    sizes: tuple[int, ...] = (1, 2),
    way: Way = Way.SUM,
    file: Path = Path("a.txt"),
    most: float = float("inf"),
) -> float32[samples]:
    return responses
"""


def test_attributes_come_back_in_the_types_that_their_op_declares(own: Path) -> None:
    Path("typed.py").write_text(TYPED)
    Path("own.yaml").write_text(
        "graph: own\nextends: demo\nedits:\n  - replace: {rewards: {op: 'typed.py:mine'}}\n"
    )
    call("plan", "own.yaml", "--devices", "1", "-o", "plan.json")
    plan = compile_graph("own.yaml", devices=1)
    again = compile_again(own).plan
    attributes = again.functions["train"]["rewards"].attributes
    assert attributes["sizes"] == (1, 2) and attributes["file"] == Path("a.txt")
    assert type(attributes["way"]).__name__ == "Way" and attributes["most"] == float("inf")
    assert again.functions == plan.functions


@pytest.mark.parametrize("name", shipped_graphs())
def test_a_saved_plan_runs_with_the_functions_that_it_was_saved_with(name: str, tmp_path: Path) -> None:
    plan = compile_graph(name, devices=1)
    (tmp_path / "plan.json").write_text(plan.json())
    assert compile_again(tmp_path / "plan.json").plan == plan


@pytest.mark.parametrize(
    "open_value",
    ["schedule.iterations=???", "models.policy.optimizer.lr=???", "models.policy.optimizer.betas=[???, 0.9]"],
)
def test_a_section_with_an_open_value_reads_back(open_value: str) -> None:
    plan = compile_graph("ppo", [open_value], devices=1)
    assert parse(plan.json()) == plan and plan.open_values


def test_another_version_of_rlgraph_is_named_where_it_plans_otherwise(own: Path) -> None:
    plan = load(own)
    assert plan.origin is not None
    other = replace(plan, origin=replace(plan.origin, rlgraph="0.0.9"))
    own.write_text(other.json())
    compile_again(own)  # the same plan: nothing to refuse
    own.write_text(replace(other, eval_every=7).json())
    with pytest.raises(RunError, match=r"eval_every: 7 -> .*\n  rlgraph 0.0.9 made it; this is "):
        compile_again(own)


def test_inline_takes_a_plan_for_one_device(own: Path) -> None:
    with pytest.raises(
        RunError, match=r"for 2 devices in a pool, and --inline runs on one\n.*--devices 1 -o plan.json"
    ):
        check_inline(compilation_of(PlanRequest(str(own)), inline=True))


def test_a_plan_of_no_graph_by_name_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(replace(PPO, origin=None).json())
    with pytest.raises(RunError, match=r"does not say which graph"):
        compile_again(tmp_path / "plan.json")


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{}")
    result = call("plan", "demo", "--against", str(tmp_path / "plan.json"))
    assert result.exit_code == 1 and "not UTF-8 text" in result.stderr
    result = call("plan", "demo", "--against", str(tmp_path / "nowhere.json"))
    assert result.exit_code == 1 and "No such file" in result.stderr


def test_the_published_schema_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/plan.schema.json", json.dumps(SCHEMA, indent=1) + "\n")


def test_the_command_prints_it() -> None:
    result = call("plan", "--schema")
    assert result.exit_code == 0 and json.loads(result.stdout) == SCHEMA
    Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_knows_every_field_and_no_other() -> None:
    assert {*SCHEMA["properties"]} == {*asdict(PPO), "version", "checksum"} == {*SCHEMA["required"]}
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        assert part["description"] and ("enum" in part or part["additionalProperties"] is False)
    data = json.loads(PPO.json())
    for wrong in (
        {**data, "version": 2},
        {**data, "more": 1},
        {**data, "seed": "1"},
        {**data, "steps": [{}]},
    ):
        assert not VALIDATOR.is_valid(wrong)
