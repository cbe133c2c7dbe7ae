"""Every broken graph under bad/ gives one golden message: place, law, what is accepted, remedy; and data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlgraph.check import problem_record
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Mark, Problem, Source
from rlgraph.syntax.shipped_files import graphs_folder

BAD = Path(__file__).parent / "bad"
NAMES = sorted(path.stem for path in BAD.glob("*.yaml"))
KEYS = {"kind", "grade", "law", "file", "override", "line", "column", "accepted", "remedy", "drawing"}


def error_of(graph: str, *overrides: str) -> GraphError:
    with pytest.raises(GraphError) as caught:
        compile_graph(graph, overrides, 0)
    return caught.value


def text_of(error: GraphError) -> str:
    """Return what the user reads, with machine paths taken out."""
    text = str(error).replace(f"{graphs_folder()}/", "graphs/")
    return text.replace(f"{BAD}/", "").replace(str(BAD), ".") + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_broken_graph(name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    error = error_of(f"{name}.yaml")
    golden(f"errors/{name}.txt", text_of(error))
    for problem in error.problems:
        record = problem_record(problem)
        assert json.loads(json.dumps(record)) == record
        assert record.keys() == KEYS
        assert record["law"] == problem.law
        assert record["override"] is None
        assert (record["file"] is None) == (record["line"] is None) == (record["column"] is None)


def test_there_are_enough_broken_graphs() -> None:
    assert len(NAMES) >= 30


def test_every_golden_error_has_its_graph(golden: Callable[[str, str], None]) -> None:
    folder = Path(__file__).parent.parent / "golden" / "errors"
    assert sorted(path.stem for path in folder.glob("*.txt")) == NAMES


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(GraphError) as caught:
        compile_graph(str(BAD / "several_errors.yaml"), devices=1)
    assert {problem.kind for problem in caught.value.problems} == {
        "unknown-op",
        "unknown-model",
        "wrong-value",
        "unknown-attribute",
    }


def test_problems_of_the_graph_and_of_its_evaluation_come_together(tmp_path: Path) -> None:
    text = (BAD / "missing_column.yaml").read_text()
    path = tmp_path / "both.yaml"
    path.write_text(text + "eval: {nodes: {rewards: {in: {responses: nope}}}, report: {accuracy: rewards}}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(path), devices=1)
    assert len(caught.value.problems) == 2


def test_a_file_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match=r"no graph `nowhere\.yaml`: there is no such file"):
        compile_graph("nowhere.yaml")
    with pytest.raises(GraphError, match="did you mean `demo`"):
        compile_graph("demmo")
    with pytest.raises(GraphError, match="that is a folder"):
        compile_graph(".")
    with pytest.raises(GraphError, match="no graph"):
        compile_graph("x" * 5000)


def test_open_values_are_listed_and_are_no_error(tmp_path: Path) -> None:
    plan = compile_graph("ppo", ["schedule.iterations=???", "models.policy.path=???", "rollout.n=???"], 2)
    assert set(plan.open_values) == {
        "models.policy.path",
        "nodes.prompts.files",
        "nodes.rollout.n",
        "schedule.iterations",
    }


@pytest.mark.parametrize(
    "name",
    [
        "models.policy.optimizer.lr",
        "models.policy.train.micro_tokens",
        "models.policy.frozen",
        "pools.main.devices",
        "schedule.save_every",
        "rollout.max_new_tokens",
        "update_policy.minibatches",
        "update_policy.kl_coef",
        "update_policy.loss.clip",
        "prompts.batch",
    ],
)
def test_any_value_may_be_left_open(name: str) -> None:
    plan = compile_graph("grpo", [f"{name}=???"], 2)
    assert any(value.endswith(name) for value in plan.open_values)
    assert plan.json()


def test_an_open_value_excuses_no_unknown_attribute() -> None:
    with pytest.raises(GraphError, match="no attribute `num`"):
        compile_graph("grpo", ["rollout.num=???"], 2)


def test_a_long_line_is_shown_around_the_place() -> None:
    mark = Mark(Source("a.yaml", "x" * 1000 + "\tHERE" + "y" * 1000), 1, 1002)
    line, caret = Problem("kind", "law", mark).render().splitlines()[1:]
    assert len(line) < 130
    assert line[caret.index("^") :].startswith("HERE")
