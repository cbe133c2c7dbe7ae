"""`rlgraph nodes`: every op and loss says what it is, and the reference page says the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.frontend.tree_paths import SECTIONS
from rlgraph.nodes import HOOKS, LOOPS, LOSSES, OPS, PAIR_LOSSES, PARSERS, TOOLS
from rlgraph.ops.declare import Loss
from rlgraph.reference.describe import describe, entry_of, find
from rlgraph.reference.pages import SECTIONS as DOCUMENTED
from rlgraph.reference.pages import entry_markdown, reference
from rlgraph.syntax import settings

CATALOG = [*OPS, *LOSSES]
OF_NO_PAPER = ("filter.judged",)  # it follows from what an op reports
NEED_A_SOURCE = (
    "advantage.",
    "update.",
    "filter.",
    "logprobs",
    "values",
    "reward.kl_penalty",
    "reward.per_sample",
)
MODELS = """
graph: example
models:
  policy: {path: a, optimizer: {lr: 1e-6}}
  critic: {path: a, head: value, optimizer: {lr: 1e-5}}
  ref:    {path: a, frozen: true}
  reward: {path: a, head: value, optimizer: {lr: 1e-5}}
  judge:  {path: a, frozen: true}
schedule: {iterations: 1}
nodes:
"""
OWN = '''
from typing import Annotated, Literal
from pydantic import Field
from rlgraph.ops import File, Tokenizer, TrainEngine, boolean, float32, int64, op, samples, tokens

@op(rows="group", head="value", when={"loss_mask": "scale"})
def mine(
    model: TrainEngine, tokenizer: Tokenizer,
    tokens: int64[samples, tokens],
    rewards: float32[samples] | None,
    loss_mask: boolean[samples, tokens] | None,
    *,
    files: list[File],
    scale: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    how: Literal["sum", "mean"] = "sum",
) -> float32[samples]:
    """Halve ``rewards``.

    y = scale x (arXiv 1234.56789, 2345.67890; doi 10.1/AB.2).

    Attributes:
        files: what to read,
            if anything.
        scale: by how much.

    Example:
        halved: {op: my_ops.py:mine}
    """

def my_loss(logprobs: float32[samples, tokens], weights: float32[samples]) -> float32[samples, tokens]:
    """Weighted likelihood."""
'''
SAID = """my_ops.py:mine
  Halve `rewards`.

  y = scale x (arXiv 1234.56789, 2345.67890; doi 10.1/AB.2).

reads
  tokens     int64[samples, tokens]
  rewards    float32[samples]          where a node writes it
  loss_mask  boolean[samples, tokens]  only where scale is not 0

writes
  (the node's name)  float32[samples]

runs       reads `model: NAME`, on its train engine; needs head value; NAME@next: after its update
sees       all samples of a prompt together
tokenizer  `tokenizer: MODEL`; by default that of the one trained language model
source     arXiv 1234.56789, arXiv 2345.67890, doi 10.1/AB.2

attributes
  files  list of: path               required  what to read, if anything.
  scale  number, at least 0, below   0.5       by how much.
         1
  how    sum or mean                 sum

example
  halved: {op: my_ops.py:mine}
"""


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ops.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CATALOG)
def test_each_says_what_it_is_in_a_line(name: str) -> None:
    first, *rest = find(name).doc.splitlines()
    assert first.endswith(".") and (not rest or not rest[0])


@pytest.mark.parametrize("name", CATALOG)
def test_each_documents_its_attributes_and_no_others(name: str) -> None:
    entry = entry_of(name)
    assert [*entry.doc.attributes] == [*find(name).attributes.model_fields]
    assert all(text for *_, text in entry.attributes)


@pytest.mark.parametrize(
    "name", [n for n in CATALOG if n in LOSSES or (n.startswith(NEED_A_SOURCE) and n not in OF_NO_PAPER)]
)
def test_each_estimator_and_loss_names_its_source(name: str) -> None:
    assert entry_of(name).doc.sources, f"the docstring of {name} names no paper, as (arXiv 2402.03300)"
    assert "\nsource" in describe(name)


@pytest.mark.parametrize("name", CATALOG)
def test_each_example_is_a_node_that_binds(name: str, tmp_path: Path) -> None:
    lines = entry_of(name).doc.example.splitlines()
    assert lines
    path = tmp_path / "example.yaml"
    path.write_text(MODELS + "".join(f"  {line}\n" for line in lines))
    graph = bind(compose(str(path)), 1)
    used = {node.op.name for node in graph.nodes}
    used |= {hook.op.name for node in graph.nodes for hook in node.hooks.values()}
    assert name in used


def test_an_example_with_a_wrong_attribute_would_not_bind(tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(MODELS + "  a: {op: rollout, model: policy, max_new_tokens: 0}\n")
    with pytest.raises(GraphError, match="at least 1"):
        bind(compose(str(path)), 1)


@pytest.mark.usefixtures("own")
def test_an_op_in_a_file() -> None:
    result = call("nodes", "my_ops.py:mine")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == SAID


@pytest.mark.usefixtures("own")
def test_a_loss_in_a_file() -> None:
    text = describe("my_ops.py:my_loss")
    assert "`loss: {kind: my_ops.py:my_loss}` of update.policy" in text
    assert "logprobs  float32[samples, tokens]  computed by the op that trains" in text
    assert "writes" not in text and "attributes" not in text


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("rollut", "did you mean `rollout`?"),
        ("ppo_clp", "did you mean `ppo_clip`?"),
        ("nothing_like_it", "my_ops.py:name"),
        ("my_ops.py:min", "did you mean `mine`?"),
        ("other.py:mine", "there is no file"),
    ],
)
def test_a_name_that_is_not_there(name: str, law: str) -> None:
    result = call("nodes", name)
    assert (result.exit_code, result.stdout) == (1, "") and law in result.stderr


def test_columns_are_under_one_another() -> None:
    rows = [line for line in describe("rollout").splitlines() if line.startswith(("  n  ", "  top_k  "))]
    assert len({line.index("whole number") for line in rows}) == 1 and len(rows) == 2
    assert max(map(len, describe("update.policy").splitlines())) <= 110


def test_the_list_is_in_groups() -> None:
    listed, _, _ = call("nodes").stdout.partition("\n\n")
    groups = {
        "ops:": OPS,
        "losses:": LOSSES,
        "pair_losses:": PAIR_LOSSES,
        "loops:": LOOPS,
        "tools:": TOOLS,
        "parsers:": PARSERS,
    }
    expected = [name for title, known in groups.items() for name in (title, *known)]
    assert [line.split()[0] for line in listed.splitlines()] == expected


def test_each_name_is_of_one_kind() -> None:
    names = [*OPS, *(name for known in HOOKS.values() for name in known)]
    several = [name for name, count in Counter(names).items() if count > 1]
    assert not several, f"a name stands in two tables of nodes/__init__.py: {several}"
    assert [name for name in CATALOG if find(name).kind is Loss] == [*LOSSES]


def test_the_reference_page_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/reference.md", reference())


def test_the_reference_has_every_op_loss_and_section(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    assert call("nodes", "--format", "markdown", "-o", str(path)).stdout == ""
    text = path.read_text(encoding="utf-8")
    for name in CATALOG:
        assert f"\n### {name}\n" in text
    in_a_graph = settings.GraphFile.model_json_schema()["$defs"].keys()
    assert {section.__name__ for section in DOCUMENTED.values()} == {"GraphFile", "Refill", *in_a_graph}


def test_a_filter_says_what_its_column_is_for() -> None:
    assert "rows: THIS_NODE" in describe("filter.mixed")
    assert "rows: THIS_NODE" not in describe("rollout")


def test_one_entry_of_the_reference() -> None:
    assert (
        call("nodes", "rollout", "--format", "markdown").stdout == entry_markdown(entry_of("rollout")) + "\n"
    )
    assert "| `n` | whole number, at least 1 | 1 | responses per prompt, at least 1. |" in reference()
    assert "| `ref_logprobs` | float32[samples, tokens] | only where kl_coef is not 0 |" in reference()


def test_a_graph_files_sections_are_those_that_compose() -> None:
    assert {*settings.GraphFile.model_fields} == {*SECTIONS, "extends", "use", "edits"}
