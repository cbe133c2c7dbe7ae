"""Kinds of steps are said in one place: what a further kind takes, and what an unknown one meets."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.actions import KINDS, MOVES, Action, Kind, MoveEngine, complete
from rlgraph.ir.plan import Target, checksum
from rlgraph.ops.column_types import DOMAINS, Domain
from rlgraph.reports.plan_file import parse

ROOT = Path(__file__).parents[2]
PRODUCT = [
    path
    for folder in ("rlgraph", "runtime", "nodes")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".js") and "vendor" not in path.parts
]


def test_a_kind_that_copies_columns_is_named_where_it_is_decided_about() -> None:
    """Where a kind is missing, mypy says so of each ``match``, and importing says so of each table."""
    name = re.compile(r"\bKind\.REPEAT\b|\bRepeat\(|\"repeat\"|'repeat'|\bdef repeat\(")
    found = {path.relative_to(ROOT).as_posix() for path in PRODUCT if name.search(path.read_text("utf-8"))}
    assert found == {
        "rlgraph/ir/actions.py",  # its record
        "rlgraph/frontend/partitions.py",  # the pass that inserts it
        "rlgraph/passes/partition.py",  # how its rows lie
        "rlgraph/costs/step_rates.py",  # its price
        "rlgraph/printing/step_text.py",  # its sentence
        "runtime/driver/needs.py",  # what has to be known before its calls are
        "runtime/driver/step_calls.py",  # its calls
        "runtime/worker/worker.py",  # the method that they call
    }


def test_a_table_of_handlers_that_lacks_a_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="no handler for steps of kind sync, load"):
        complete({kind: str for kind in Kind if kind not in (Kind.SYNC, Kind.LOAD)})
    assert complete(dict.fromkeys(MOVES, 1), MOVES)


def test_what_leaves_a_device_has_a_kind_that_brings_it_back() -> None:
    moves: list[MoveEngine] = []
    for engine in ("train", "serve"):
        moves += [MoveEngine("policy", engine, "off", ()), MoveEngine("policy", engine, "back", ())]
    assert {move.kind for move in moves} == {*MOVES}


def test_every_kind_has_a_record() -> None:
    assert {*KINDS} | {MoveEngine} == {*get_args(Action)}
    assert {*KINDS.values()} | {*MOVES} == {*Kind}


def test_a_plan_file_with_an_unknown_kind_is_refused() -> None:
    fields = json.loads(compile_graph("grpo", devices=2).json())
    fields["steps"][0]["kind"] = "teleport"
    fields["checksum"] = checksum(fields)
    with pytest.raises(GraphError, match=r"`steps\[0\].kind`: input should be 'run', 'repeat'"):
        parse(json.dumps(fields))


@pytest.mark.parametrize(
    ("node", "field", "value", "law"),
    [
        ("answer*samples", "parts", ["weights"], "a step of kind repeat can't have this `parts`"),
        ("rollout", "source", "main", "a step of kind run can't have this `source`"),
        ("rollout", "engine", "both", "`engine` is train, serve or empty, not 'both'"),
        ("sync:policy", "models", {}, "a step of kind sync has one model, with the version that it reads"),
    ],
)
def test_a_plan_file_whose_step_has_what_its_kind_has_not_is_refused(
    node: str, field: str, value: object, law: str
) -> None:
    fields = json.loads(compile_graph("grpo", devices=2).json())
    (step,) = [step for step in fields["steps"] if step["node"] == node]
    step[field] = value
    fields["checksum"] = checksum(fields)
    with pytest.raises(GraphError, match=re.escape(law)):
        parse(json.dumps(fields))


def naming(*words: str) -> set[str]:
    """Product files in which one of some quoted words occurs."""
    name = re.compile("|".join(rf"[\"']{word}[\"']" for word in words))
    return {path.relative_to(ROOT).as_posix() for path in PRODUCT if name.search(path.read_text("utf-8"))}


def test_a_layout_of_rows_is_named_in_two_files() -> None:
    assert naming("balanced") == {"rlgraph/passes/partition.py", "runtime/driver/rows.py"}


def test_versions_types_and_layouts_are_read_once_from_a_plan_file() -> None:
    plan = parse(compile_graph("ppo", devices=2).json())
    versions = {version for step in plan.steps for version in step.models.values()}
    assert {version.offset for version in versions if version} == {0}
    assert {step.layout.minibatches for step in plan.steps} == {0, 4}
    assert {column.type.axis for column in plan.columns["train"].values()} == {
        None,
        "tokens",
        "prompt_tokens",
    }
    fields = json.loads(plan.json())
    fields["steps"][-1]["models"] = {"policy": "v2"}
    fields["checksum"] = checksum(fields)
    with pytest.raises(GraphError, match="is not a version of weights"):
        parse(json.dumps(fields))


def test_a_copy_of_a_column_says_of_which() -> None:
    columns = compile_graph("grpo", (), 2).columns["train"]
    assert columns["answer*samples"].origin == columns["answer"].origin == "answer"
    assert not columns["answer*samples"].moved
    moved = {name: column for name, column in columns.items() if column.moved}
    assert moved and all(name.startswith(f"{column.origin}@") for name, column in moved.items())


TURNS = """
from rlgraph.ops import float32, op, samples, text
from rlgraph.ops.column_types import DOMAINS, Domain


class turns(Domain):
    "One row per turn of a conversation."
    answered, made_of = True, "samples"


DOMAINS["turns"] = turns


@op(makes="turns", times="most")
def cut(responses: text[samples], *, most: int = 2) -> text[turns]:
    "The turns of a response."


@op()
def judge(said: text[turns], answer: text[samples] | None) -> float32[turns]:
    "What a turn is worth."


@op()
def whole(said: text[samples]) -> float32[samples]:
    "What a sample is worth."
"""


def test_a_domain_is_a_class_and_the_ops_that_make_and_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass, cost, text or picture names a domain: here one is added without an edit of any of them."""
    monkeypatch.setitem(DOMAINS, "turns", Domain)  # taken out again behind the test
    (tmp_path / "turns.py").write_text(TURNS)
    path = tmp_path / "turns.yaml"
    path.write_text(
        "graph: turns\nextends: grpo\nedits:\n"
        "- remove: [update_policy, advantages, ref_logprobs, old_logprobs, rewards, models.ref]\n"
        "- add: {said: {op: 'turns.py:cut'}, worth: {op: 'turns.py:judge'}}\n"
    )
    plan = compile_graph(str(path), (), 2, Target("h100-8"))
    worth = plan.columns["train"]["worth"]
    assert (worth.type, plan.domain("train", "worth").times) == ("float32[turns]", 2)
    assert "answer*samples*turns" in plan.columns["train"]
    assert parse(plan.json()).domains == plan.domains
    assert plan.predicted and any("2,048 turns" in line for line in plan.predicted.assumed)
    path.write_text(path.read_text() + "- add: {more: {op: 'turns.py:whole'}}\n")
    with pytest.raises(GraphError, match="an op that reduces groups makes samples of turns"):
        compile_graph(str(path), (), 2)
