"""How much work an iteration is: rows, tokens, and how long responses are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.workload import Lengths, workload
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan


@pytest.mark.parametrize(("mean", "longest"), [(512, 1024), (100, 1024), (1000, 1024), (700, 28_000)])
def test_lengths_have_their_mean(mean: float, longest: float) -> None:
    lengths, points = Lengths(mean, longest), 20_000
    alive = [math.exp(-lengths.rate * (i + 0.5) * longest / points) for i in range(points)]
    assert sum(alive) * longest / points == pytest.approx(mean, rel=1e-3)
    square = sum(2 * (i + 0.5) * longest / points * a for i, a in enumerate(alive)) * longest / points
    assert lengths.square == pytest.approx(square, rel=1e-3)


def test_responses_that_all_reach_the_limit() -> None:
    lengths = Lengths(100, 100)
    assert lengths.square == 100**2 and lengths.of_longest(7) == 100
    assert {live for _, live, _ in lengths.alive(7)} == {7}


def test_rows_and_tokens_come_from_the_graph() -> None:
    work = workload(compile_graph("grpo", ["rollout.n=16"], 2))
    assert work.rows["prompts"] == 128 and work.rows["samples"] == 2048
    assert (work.prompt, work.longest_prompt) == (256, 512)
    assert (work.responses.mean, work.responses.longest) == (512, 1024)
    given = workload(compile_graph("grpo", (), 2), 100, 5000)
    assert (given.prompt, given.responses.mean) == (100, 1024)


def test_a_filter_is_taken_to_keep_every_row() -> None:
    work = workload(compile_graph("dapo", (), 2))
    assert work.rows["samples/informative"] == work.rows["samples"]
    assert "filters keep every row" in work.assumed


OWN_OP = """
from rlgraph.ops import float32, op, samples, text


@op()
def length(
    responses: text[samples], *,
    max_prompt_tokens: int = 7000, max_new_tokens: int = 9, batch: int = 3, epochs: int = 5,
) -> float32[samples]:
    "Shorter is better."
    return -responses
"""


def planned(folder: Path, declared: str) -> Plan:
    """GRPO with an op of the user's in place of its reward."""
    (folder / "mine.py").write_text(OWN_OP.replace("@op()", declared))
    path = folder / "mine.yaml"
    path.write_text("graph: grpo\nextends: grpo\nedits:\n- set: {rewards: {op: 'mine.py:length'}}\n")
    return compile_graph(str(path), devices=2)


def test_an_attribute_means_nothing_by_its_name(tmp_path: Path) -> None:
    own = planned(tmp_path, "@op()")
    assert own.functions["train"]["rewards"].attributes["max_prompt_tokens"] == 7000
    assert workload(own) == workload(compile_graph("grpo", devices=2))


def test_an_attribute_means_what_its_op_declares(tmp_path: Path) -> None:
    work = workload(planned(tmp_path, "@op(roles={'prompt_limit': 'max_prompt_tokens'})"))
    assert (work.prompt, work.longest_prompt) == (3500, 7000)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(GraphError, match="roles"):
        planned(tmp_path / "wrong", "@op(roles={'prompt_limit': 'longest'})")
