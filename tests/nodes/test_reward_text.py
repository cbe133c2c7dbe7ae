"""Rewards that look at the text alone, their weighted sum, a reward model, and a filter of what failed."""

from __future__ import annotations

import doctest
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from recorded import means
from rlgraph.nodes.reward import code as code_module
from rlgraph.nodes.reward import judging as judging_module
from rlgraph.nodes.reward import suspicious as suspicious_module
from rlgraph.nodes.reward import text as text_module
from rlgraph.nodes.reward.model import behind_the_end, reward_model
from rlgraph.nodes.reward.shaping import total
from rlgraph.nodes.reward.text import extract, f1, form
from rlgraph.nodes.select.filter import judged
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context
from rlgraph.ops.signature import signature


def context(node: str = "rewards") -> Context:
    return Context(node=node, seed=0, iteration=0)


F1 = [
    ("the cat sat on the mat", "cat mat", 2 / 3),  # cat sat on mat: 2 of 4, 2 of 2
    ("Paris!", "paris", 1.0),
    ("An apple, a pear", "apple pear", 1.0),
    ("two two", "two", 2 / 3),  # a word counts as often as both have it
    ("London", "Paris", 0.0),
    ("", "Paris", 0.0),
    ("the", "a", 1.0),  # nothing is left of either
    ("", "", 1.0),
    ("theory of another", "theory another", 0.8),  # articles are whole words
]


def test_f1_by_hand() -> None:
    ctx = context()
    responses, answers, expected = (list(column) for column in zip(*F1, strict=True))
    assert f1(ctx, responses, answers).tolist() == pytest.approx(expected)
    assert means(ctx) == {"reward/mean": (pytest.approx(sum(expected)), len(F1))}


@pytest.mark.parametrize(("given", "wanted"), [row[:2] for row in F1])
def test_f1_is_symmetric_and_blind_to_order(given: str, wanted: str) -> None:
    turned = " ".join(reversed(given.split()))
    there, back, other = f1(context(), [given, wanted, turned], [wanted, given, wanted]).tolist()
    assert there == back == other


BOXED = [
    (r"so \boxed{Paris}, not \boxed{ The  Hague }.", "The  Hague"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed {\{1, 2\}} is a set", r"\{1, 2\}"),
    (r"\boxed{\left\{x\right.}", r"\left\{x\right."),  # an escaped brace closes nothing
    (r"\boxed{1}, or rather \boxed{2", ""),  # cut off
    ("Paris", ""),
    ("", ""),
]


def test_the_last_box_is_the_answer() -> None:
    ctx = context("final")
    responses, expected = (list(column) for column in zip(*BOXED, strict=True))
    assert extract(ctx, responses) == expected
    assert means(ctx) == {"final/found": (4.0, len(BOXED))}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("<answer>(.*?)</answer>", ["b\nc", ""]),
        ("(?i)answer: *([^\n]+)", ["", "4"]),
        ("[0-9]", ["", "4"]),
        ("<(a|b)nswer>(.*?)<", ["a", ""]),
    ],
)
def test_a_pattern_finds_the_last_answer(pattern: str, expected: list[str]) -> None:
    responses = ["<answer>a</answer> no: <answer> b\nc </answer>", "Answer: 3\nANSWER:  4\nso"]
    assert extract(context("final"), responses, pattern=pattern) == expected


def test_format_matches_the_whole_response() -> None:
    ctx = context("formatted")
    responses = ["<a>1\n2</a>", "  <a>x</a>\n", "so <a>x</a>", "<a></a>", ""]
    assert form(ctx, responses, pattern="<a>.+</a>").tolist() == [1, 1, 0, 0, 0]
    assert means(ctx) == {"formatted/mean": (2.0, 5)}


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        signature("reward.format", form).attributes(pattern="(")


def test_sum_by_hand() -> None:
    ctx = context("scores")
    one, two, three = (torch.tensor(x) for x in ([1.0, 0.0], [0.0, 1.0], [2.0, 2.0]))
    assert total(ctx, one, two, None, None, weight_2=0.5).tolist() == [1.0, 0.5]
    assert means(ctx) == {"scores/mean": (1.5, 2)}
    out = total(context(), one, two, three, None, weight=2.0, weight_2=-1.0, weight_3=0.25)
    assert out.tolist() == [2.5, -0.5]


def test_judged_keeps_what_did_not_fail() -> None:
    ctx = context("judged")
    assert judged(ctx, torch.tensor([True, False, False])).tolist() == [False, True, True]
    assert means(ctx) == {"judged/kept": (2.0, 3)}


class Prefix:
    """An engine whose value of a token is made of the tokens before it: their sum."""

    def values(self, tokens: Ragged, loss_mask: Ragged) -> Ragged:
        rows = [[float(sum(row[:place])) for place in range(len(row))] for row in tokens.tolist()]
        before = Ragged.of(rows, torch.float32)
        return before.like(before.values * loss_mask.values)


def test_a_reward_model_reads_the_whole_sequence() -> None:
    ctx, engine = context(), Prefix()
    model: Any = engine
    tokens = Ragged.of([[5, 7], [3], [2, 2, 9]])
    assert reward_model(ctx, model, tokens).tolist() == [12.0, 3.0, 13.0]
    assert means(ctx) == {"reward/mean": (28.0, 3)}
    assert reward_model(context(), model, Ragged.of([], torch.int64)).tolist() == []


def test_behind_the_end_is_one_token_more() -> None:
    closed, last = behind_the_end(Ragged.of([[5, 7], [], [3]], torch.int64))
    assert closed.tolist() == [[5, 7, 0], [0], [3, 0]]
    assert last.tolist() == [[False, False, True], [True], [False, True]]


EXAMPLES = {text_module: 4, code_module: 1, judging_module: 4, suspicious_module: 2}


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module) == (0, EXAMPLES[module])
