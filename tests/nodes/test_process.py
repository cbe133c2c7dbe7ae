"""Rewards for steps: where these end, what a model says of them, and advantages against a slow reference."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch

from rlgraph.nodes.advantage.process import process
from rlgraph.nodes.reward.model import process as scored
from rlgraph.nodes.reward.shaping import agreement
from rlgraph.nodes.select.mask import steps
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context
from rlgraph.runtime.demo_tools import make_tokenizer


def slow(
    rewards: list[list[float]], ends: list[list[bool]], mask: list[list[bool]], group: list[int], scale: bool
) -> list[list[float]]:
    found = []
    for row, own in enumerate(rewards):
        every = [
            r
            for other, numbers in enumerate(rewards)
            if group[other] == group[row]
            for r, end, written in zip(numbers, ends[other], mask[other], strict=True)
            if end and written
        ]
        several = len(every) > 1
        mean, sigma = (statistics.mean(every), statistics.stdev(every)) if several else (0.0, 1.0)
        sigma = sigma + 1e-6 if scale else 1.0
        taken = [
            (r - mean) / sigma if e and w else 0.0 for r, e, w in zip(own, ends[row], mask[row], strict=True)
        ]
        found.append([sum(taken[t:]) if mask[row][t] else 0.0 for t in range(len(own))])
    return found


@pytest.mark.parametrize("case", range(6))
def test_advantages_are_those_of_the_formula(case: int) -> None:
    chance = random.Random(case)
    lengths = [chance.randint(0, 7) for _ in range(8)]
    group = [chance.choice([2, 5, 6]) for _ in lengths]
    rewards = [[chance.gauss(0, 1) for _ in range(length)] for length in lengths]
    mask = [[chance.random() < 0.7 for _ in range(length)] for length in lengths]
    ends = [[case % 2 == 0 or chance.random() < 0.5 for _ in range(length)] for length in lengths]
    given = None if case % 2 == 0 else Ragged.of(ends, torch.bool)
    column = Ragged.of(rewards, torch.float32)
    found = process(column, given, torch.tensor(group), Ragged.of(mask, torch.bool), scale=case > 2)
    for row, expected in enumerate(slow(rewards, ends, mask, group, scale=case > 2)):
        assert found[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_what_was_right_before_a_mistake_keeps_its_credit_by_hand() -> None:
    rewards = Ragged.of([[1.0, 1.0], [1.0, 0.0]])
    found = process(rewards, None, torch.tensor([0, 0]), Ragged.of([[True] * 2] * 2), scale=False)
    assert found.tolist() == [[0.5, 0.25], [-0.5, -0.75]]


def test_steps_end_at_a_text_and_with_the_response() -> None:
    tokenizer: Any = make_tokenizer()
    ids = tokenizer("ab. c. de")["input_ids"]
    tokens, mask = Ragged.of([ids, ids, []]), [[False] + [True] * 8, [True] * 6 + [False] * 3, []]
    made = steps(tokenizer, tokens, Ragged.of(mask, torch.bool), end=". ")
    places = [[place for place, true in enumerate(row) if true] for row in made.tolist()]
    assert places == [[3, 6, 8], [3, 5], []]
    assert steps(tokenizer, tokens, Ragged.of(mask, torch.bool), end="x").sum().tolist() == [1, 1, 0]


def test_a_token_is_scored_once_it_is_read() -> None:
    class Model:
        def values(self, tokens: Ragged, mask: Ragged) -> Ragged:
            """What it has read before each token: their sum, where it is asked."""
            before = torch.nn.functional.pad(tokens.values.cumsum(0), (1, 0))
            read = before[:-1] - tokens.spread(before[tokens.offsets[:-1]]).values
            return tokens.like(torch.where(mask.values, read, 0).float())

    tokens = Ragged.of([[1, 2, 3], [4, 5]], torch.int64)
    mask = Ragged.of([[False, True, True], [False, True]])
    model: Any = Model()
    assert scored(Context("prm", 0, 0), model, tokens, mask).tolist() == [[0, 3, 6], [0, 9]]


def test_agreement() -> None:
    ctx = Context("agreed", 0, 0)
    assert agreement(ctx, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0])).tolist() == [1, 1, 0]
