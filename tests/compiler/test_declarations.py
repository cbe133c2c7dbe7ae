"""Every argument of ``@op`` is checked when it is declared; errors stand at the user's file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.check import problem_record
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.nodes import OPS
from rlgraph.ops import float32, op, samples, text
from rlgraph.ops.declare import Declaration, loading_attributes
from rlgraph.ops.op_error import OpError
from rlgraph.ops.registry import load
from rlgraph.reference.describe import find

HEAD = """import torch
from rlgraph.ops import Context, TrainEngine, boolean, float32, int64, op, samples, text


@op({})
def f(responses: text[samples], *, n: int = 2) -> float32[samples]:
    return torch.ones(len(responses))
"""
GRAPH = "graph: g\nextends: demo\nedits:\n  - replace: {{rewards: {{op: '{}'}}}}\n"

# arguments -> a part of the law, and what is accepted or a remedy
WRONG = [
    ('row="group"', "@op has no argument `row`", "did you mean `rows`?"),
    ('rows="al"', "`rows` of @op can't be 'al'", "did you mean `all`?"),
    ("rows=None", "`rows` of @op can't be None", "each"),
    ('assumes=("grups",)', "`assumes` of @op can't be 'grups'", "did you mean `groups`?"),
    ('assumes=("groups")', "must be a tuple of names; it is the text 'groups'", "write assumes=('groups',)"),
    ('assumes={"groups": 1}', "`assumes` of @op must be a tuple of names", ""),
    ('makes="sample"', "names `sample`, which has no rows", "did you mean `samples`?"),
    ('makes="prompts"', 'makes "prompts", and it returns a column of samples', 'write makes="samples"'),
    ("makes=3", "`makes` of @op must be a name, as a text; it is 3", ""),
    ('state="kept"', "`state` of @op can't be 'kept'", "did you mean `keeps`?"),
    ('state="keeps", rows="all"', "`state` of @op needs a parameter for the Context", ""),
    ('roles={"row": "n"}', "a key of `roles` of @op can't be 'row'", "did you mean `rows`?"),
    ('roles={"rows": "nn"}', "`roles` of @op names `nn`, which is not an attribute", "n"),
    ('roles=["rows"]', "`roles` of @op must be a dict", ""),
    ('stores={"x": "int7"}', "`stores['x']` of @op can't be 'int7'", "did you mean `int8`?"),
    ('stores={"x": "int8"}', "names `x`, which is not an int64 column", ""),
    ('measures={"m": "kl"}', "`measures` of @op names `m`, which is not an attribute", "n"),
    ('measures={"n": 3}', "`measures` of @op must be a dict of texts by text", ""),
    ('makes="samples", holds=True', "`holds` of @op needs a parameter for the Context", ""),
    ('holds="yes"', "`holds` of @op must be True or False; it is 'yes'", ""),
    ("holds=True", "`holds` of @op needs a parameter for the Context", ""),
    ('load="read"', "`load` of @op must be a function", ""),
    ("load=print", "`load` of @op belongs to a source", ""),
    ('makes="samples", times="m"', "`times` of @op names `m`, which is not an attribute", "n"),
    ('times="n"', "`times` of @op counts new rows, and `makes` does not say which", 'as makes="samples"'),
    ('counts="count"', "`counts` of @op counts new rows, and `makes` does not say which", "samples"),
    ("of_each=0", "`of_each` of @op must be a whole number, at least 1; it is 0", ""),
    ("leaves=-1", "`leaves` of @op must be a whole number, at least 0; it is -1", ""),
    ("leaves=1", "`leaves` of @op needs a parameter for the Context", ""),
    ('leaves_with="n"', "`leaves_with` of @op needs `leaves`", ""),
    (
        'streams="rollout.part"',
        "names `rollout.part`, which is not a shipped op",
        "did you mean `rollout.partial`?",
    ),
    ("updates=True", "`updates` of @op needs a parameter for the model that it trains", ""),
    ('head="values"', "`head` of @op can't be 'values'", "did you mean `value`?"),
    ('head="value"', "`head` of @op is about a model", "model: TrainEngine"),
    ('when={"responses": "n"}', "`when` of @op names `responses`, which is not an optional column", ""),
    ('when={"n": "m"}', "`when` of @op names `m`, which is not an attribute", "n"),
    ('own=("responses",)', "`own` of @op names `responses`, which is not an optional column", ""),
    ("recorded=1", "`recorded` of @op must be True or False; it is 1", ""),
    ("filters=True", "a filter returns one boolean column", ""),
    ("beside=0.5", "`beside` of @op must be True or False", ""),
    ('columns="fields"', "`fields` names columns beside those of a NamedTuple", ""),
    ('reads="n"', "must be a tuple of names; it is the text 'n'", "write reads=('n',)"),
    ('reads=("n",)', "`reads` names the attribute", ""),
]


def problem_of(file: str) -> Problem:
    with pytest.raises(GraphError) as caught:
        find(f"{file}:f")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(("arguments", "law", "help_"), WRONG)
def test_a_wrong_argument_is_refused_at_its_place(
    arguments: str, law: str, help_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.format(arguments))
    problem = problem_of("mine.py")
    assert law in problem.law
    assert problem.law.startswith("op `mine.py:f`: ")
    assert help_ in "\n".join([*problem.accepted, problem.remedy])
    assert problem.mark is not None
    assert str(problem.mark).startswith("mine.py:5:")
    argument = arguments.split("=")[0]
    line, before = problem.mark.excerpt()
    assert line[before:].startswith(argument) or arguments.count("=") > 1


def test_every_argument_is_among_those_that_are_refused() -> None:
    tried = {name for arguments, _, _ in WRONG for name in Declaration.__annotations__ if name in arguments}
    assert tried == {*Declaration.__annotations__}


@pytest.mark.parametrize("form", ["@op", "@op()", '@op(assumes=["groups"], rows="group")'])
def test_forms_that_are_right(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.replace("@op({})", form))
    declared = find("mine.py:f").declared
    if form.endswith(")") and "assumes" in form:
        assert (declared.assumes, declared.rows) == (("groups",), "group")
    else:
        assert declared == Declaration()


def test_arguments_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.format('"group"'))
    problem = problem_of("mine.py")
    assert (problem.law, problem.remedy) == (
        "op `mine.py:f`: @op takes its arguments by name, and 'group' has none",
        'as @op(rows="group")',
    )
    assert str(problem.mark) == "mine.py:5:1"


def test_python_alone_says_it_too() -> None:
    with pytest.raises(OpError) as caught:

        @op(rows="al")  # type: ignore[call-overload, untyped-decorator]
        def f(responses: text[samples]) -> float32[samples]: ...

    assert str(caught.value) == (
        "`rows` of @op can't be 'al'\n  accepted: each, group, all\n  did you mean `all`?"
    )


@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_commands_name_the_line_of_the_users_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.format('\n    rows="each",\n    assumes=("grups",),\n'))
    Path("g.yaml").write_text(GRAPH.format("mine.py:f"))
    result = CliRunner().invoke(main, [command, "g.yaml"])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    start = lines.index("mine.py:7:5: op `mine.py:f`: a name in `assumes` of @op can't be 'grups'")
    assert lines[start + 1] == '  7 |     assumes=("grups",),'
    assert "  did you mean `groups`?" in lines


def test_a_file_that_is_named_twice_has_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.format('rows="al"'))
    edits = GRAPH.format("mine.py:f") + "  - add: {more: {op: 'mine.py:g'}}\n"
    Path("g.yaml").write_text(edits)
    with pytest.raises(GraphError) as caught:
        compile_graph("g.yaml")
    assert [problem.law for problem in caught.value.problems] == [
        "op `mine.py:f`: `rows` of @op can't be 'al'"
    ]


def test_another_function_of_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = '\n\n@op(rows="al")\ndef other(responses: text[samples]) -> float32[samples]: ...\n'
    Path("mine.py").write_text(HEAD.format("") + other)
    problem = problem_of("mine.py")
    assert problem.law == "op `mine.py:other`: `rows` of @op can't be 'al'"
    assert str(problem.mark) == "mine.py:10:5"


def test_a_function_of_another_file_is_named_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("parts_of_mine.py").write_text(HEAD.format('times="m", makes="samples"'))
    Path("mine.py").write_text("from parts_of_mine import f\n")
    assert str(problem_of("mine.py").mark) == "parts_of_mine.py:5:5"


def test_a_missing_return_annotation_is_said_at_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD.format("").replace(" -> float32[samples]", ""))
    Path("g.yaml").write_text(GRAPH.format("mine.py:f"))
    with pytest.raises(GraphError) as caught:
        compile_graph("g.yaml")
    (problem, *_) = caught.value.problems
    law = "op `mine.py:f`: it declares no output: its signature has no return annotation"
    assert (problem.law, str(problem.mark)) == (law, "mine.py:6:1")
    assert problem.remedy.startswith("annotate what it returns, as -> float32[samples]")
    assert problem_record(problem)["file"] == "mine.py"
    assert problem_of("mine.py").law == law
    annotated = Path("mine.py").read_text().replace(" = 2):", " = 2) -> None:")
    Path("none.py").write_text(annotated)
    assert find("none.py:f").outputs == ()


def test_what_reads_all_data_takes_what_it_is_called_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
from rlgraph.ops import op, prompts, text


def read(files, odd): ...


@op(makes="prompts", rows="all", roles={"rows": "batch"}, load=read)
def f(*, files: list[str], batch: int, shuffle: bool = True) -> text[prompts]: ...
"""
    Path("mine.py").write_text(source)
    problem = problem_of("mine.py")
    assert "`load` of @op can't be called as it will be: missing a required argument: 'odd'" in problem.law
    assert problem.remedy == "give it the parameters (files)"
    Path("right.py").write_text(source.replace(", odd", ""))
    assert loading_attributes(find("right.py:f").attributes.model_fields, {"rows": "batch"}) == ["files"]


def test_laws_and_shipped_ops_are_what_declarations_accept() -> None:
    for name in OPS:
        assert {*load(OPS[name], name).declared.assumes} <= {*CALL_LAWS}
