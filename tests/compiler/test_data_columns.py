"""Columns that an attribute of an op names: typed, and read by name as any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError

GRAPH = """\
graph: mine
models:
  policy: {path: some/model, optimizer: {lr: 1e-4}}
nodes:
  prompts: PROMPTS
  rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 8}
  rewards: {op: "mine.py:judged"}
  advantages: {op: advantage.grpo}
  old_logprobs: {op: logprobs, model: policy}
  update: {op: update.policy, model: policy, loss: {kind: ppo_clip}}
schedule: {iterations: 10}
"""
OPS = '''\
from types import SimpleNamespace
from typing import NamedTuple

from rlgraph.ops import Context, float32, int64, json, op, prompt_tokens, prompts, samples, text


class Drawn(NamedTuple):
    prompt: int64[prompts, prompt_tokens]
    seen: int64[prompts]


@op(makes="prompts", rows="all", columns="fields", roles={"rows": "batch"})
def own(ctx: Context, *, batch: int = 4, fields: dict[str, str] | None = None) -> Drawn:
    """Prompts of a source of one's own."""
    return SimpleNamespace()


@op(columns="columns")
def alone(ctx: Context, rewards: float32[samples], *, columns: dict[str, str]) -> float32[samples]:
    """One column, beside which there can be no others."""


@op()
def judged(
    responses: text[samples], rubric: text[samples], tests: json[samples], level: float32[samples]
) -> float32[samples]:
    """A reward of three columns of the data."""
    return level
'''
SHIPPED = "{op: data.prompts, files: [a.jsonl], batch: 8, columns: {rubric: text, tests: json, LEVEL}}"
OWN = '{op: "mine.py:own", fields: {rubric: text, tests: json, LEVEL}}'


def types(folder: Path, prompts: str, level: str = "level: float32") -> dict[str, str]:
    (folder / "mine.py").write_text(OPS)
    (folder / "mine.yaml").write_text(GRAPH.replace("PROMPTS", prompts.replace("LEVEL", level)))
    plan = compile_graph(str(folder / "mine.yaml"), devices=2)
    return {name: str(column.type) for name, column in plan.columns["train"].items()}


@pytest.mark.parametrize("prompts", [SHIPPED, OWN])
def test_columns_of_an_attribute_are_repeated_as_others_are(tmp_path: Path, prompts: str) -> None:
    columns = types(tmp_path, prompts)
    assert columns["tests"] == "json[prompts]" and columns["level"] == "float32[prompts]"
    assert columns["tests*samples"] == "json[samples]" and columns["rubric*samples"] == "text[samples]"


@pytest.mark.parametrize("prompts", [SHIPPED, OWN])
@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("levels: float32", "reads column `level`, which nothing writes.*did you mean `levels`"),
        ("level: text", r"reads `level` as float32\[samples\]; column `level`.* is text\[prompts\]"),
        ("level: flaot32", "did you mean `float32`"),
        ("prompt: text", "names `prompt`, which op .* writes anyway"),
        ("a-b: text", "`a-b` is not a name"),
    ],
)
def test_what_is_wrong_is_said_by_the_check(tmp_path: Path, prompts: str, level: str, said: str) -> None:
    with pytest.raises(GraphError) as error:
        types(tmp_path, prompts, level)
    assert re.search(said, str(error.value), re.DOTALL), str(error.value)


def test_a_source_of_prompts_names_no_column_of_samples(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"float32\[samples\] is not of prompts, of which op mine.py:own"):
        types(tmp_path, OWN, 'level: "float32[samples]"')


def test_a_lone_output_has_no_columns_beside_it(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="names columns beside those of a NamedTuple"):
        types(tmp_path, '{op: "mine.py:alone", columns: {}}')


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("level: {form: a.b}", "must be 'from' or 'type' or 'default', not 'form'; did you mean `from`?"),
        ("level: {from: [a]}", "must be a path such as 'extra_info.index'"),
    ],
)
def test_what_the_data_understand_of_a_column(tmp_path: Path, level: str, said: str) -> None:
    with pytest.raises(GraphError) as error:
        types(tmp_path, SHIPPED, level)
    assert said in str(error.value) and "`prompts.columns.level`" in str(error.value)


def test_the_example_of_the_page_on_data_is_a_graph(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "data.md").read_text()
    (text,) = re.findall(r"```yaml gsm8k.yaml\n(.*?)```", page, re.S)
    (tmp_path / "gsm8k.yaml").write_text(text)
    plan = compile_graph(str(tmp_path / "gsm8k.yaml"), (), 1)
    assert plan.schedule.epochs == {"prompts": 3} and plan.report == {"accuracy": "rewards"}
