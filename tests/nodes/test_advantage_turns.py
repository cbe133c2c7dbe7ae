"""Credit by turn against a slow reference that is written from the formula, and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from rlgraph.nodes.advantage.turns import turns
from rlgraph.nodes.select.mask import observations
from rlgraph.nodes.support.ragged import Ragged

Talk = list[tuple[int, list[int]]]  # of each turn how many tokens the policy writes, and what answers it


def columns(talks: list[Talk]) -> dict[str, Ragged]:
    rows: dict[str, list[list[Any]]] = {"tokens": [], "turn": [], "loss_mask": []}
    for talk in talks:
        row: list[tuple[int, int, bool]] = [(9, 0, False)] * 2
        for t, (length, answer) in enumerate(talk, 1):
            row += [(5, t, True)] * length + [(token, t, False) for token in answer]
        for name, column in zip(rows, zip(*row, strict=True), strict=True):
            rows[name].append([*column])
    kinds = {"tokens": torch.int64, "turn": torch.int16, "loss_mask": torch.bool}
    return {name: Ragged.of(rows[name], kind) for name, kind in kinds.items()}


def slow(
    talks: list[Talk], group: list[int], earned: list[list[float]], gamma: float, lam: float, scale: bool
) -> list[list[float]]:
    returns = [[sum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in earned]

    def state(row: int, t: int) -> Any:
        return group[row], t, tuple(talks[row][t - 1][1]) if t else ()

    def value(row: int, t: int) -> float:
        if t == len(talks[row]):
            return 0.0
        there = [other for other in range(len(talks)) if group[other] == group[row] and t < len(talks[other])]
        same = [other for other in there if state(other, t) == state(row, t)]
        members = same if len(same) > 1 else there
        return sum(returns[other][t] for other in members) / len(members)

    found = []
    for row, own in enumerate(earned):
        delta = [own[t] + gamma * value(row, t + 1) - value(row, t) for t in range(len(own))]
        found.append(
            [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]
        )
    if not scale:
        return found
    every = {g: [a for row, own in enumerate(found) if group[row] == g for a in own] for g in group}
    sigma = {
        g: math.sqrt(sum(a * a for a in own) / (len(own) - 1)) if len(own) > 1 else 1.0
        for g, own in every.items()
    }
    return [[a / (sigma[group[row]] + 1e-6) for a in own] for row, own in enumerate(found)]


@pytest.mark.parametrize("case", range(8))
def test_advantages_are_those_of_the_formula(case: int) -> None:
    chance = random.Random(case)
    talks = [
        [(chance.randint(1, 3), [chance.randint(1, 2)]) for _ in range(chance.randint(0, 4))]
        for _ in range(9)
    ]
    group = [chance.choice([3, 7, 8]) for _ in talks]
    rewards = [chance.random() for _ in talks]
    by_turn = [[chance.random() for _ in range(4)] for _ in talks] if case % 2 else None
    earned = [
        [
            (by_turn[row][t] if by_turn else 0.0) + rewards[row] * (t == len(talk) - 1)
            for t in range(len(talk))
        ]
        for row, talk in enumerate(talks)
    ]
    gamma, lam, scale = chance.choice([1.0, 0.9]), chance.choice([0.0, 0.5, 1.0]), case % 3 > 0
    wanted = slow(talks, group, earned, gamma, lam, scale)
    own = columns(talks)
    said = torch.tensor(by_turn) if by_turn else None
    found = turns(torch.tensor(rewards), said, torch.tensor(group), **own, gamma=gamma, lam=lam, scale=scale)
    for row, expected in enumerate(wanted):
        each = [0.0, 0.0]
        for advantage, (length, answer) in zip(expected, talks[row], strict=True):
            each += [advantage] * length + [0.0] * len(answer)
        assert found[row].tolist() == pytest.approx(each, rel=1e-4, abs=1e-5)


def test_a_good_call_is_praised_though_the_answer_is_wrong_by_hand() -> None:
    # three calls get 7, of which one is copied wrongly; one call gets 8, which is never right
    talks: list[Talk] = [[(1, [answer]), (1, [])] for answer in (7, 7, 7, 8)]
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    found = turns(rewards, None, torch.zeros(4, dtype=torch.int64), **columns(talks), lam=0.0, scale=False)
    call, answer = 2 / 3 - 1 / 2, 1 / 3
    assert found[0].tolist() == pytest.approx([0, 0, call, 0, answer])
    assert found[2].tolist() == pytest.approx([0, 0, call, 0, -2 / 3])
    assert found[3].tolist()[2] == pytest.approx(0.0)  # no other is in its state: its value is that of all
    assert found[3].tolist()[4] == pytest.approx(-1 / 2)


def test_one_turn_is_a_group_baseline_and_none_is_nothing() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    found = turns(rewards, None, group, **columns([[(2, [])], [(1, [])], []]), scale=False)
    assert found.tolist() == [pytest.approx([0, 0, 0.5, 0.5]), pytest.approx([0, 0, -0.5]), [0, 0]]
    assert turns(rewards[:1], None, group[:1], **columns([[]])).tolist() == [[0, 0]]


def test_fewer_rewards_than_turns_are_refused() -> None:
    own = columns([[(1, [1]), (1, [])]] * 2)
    with pytest.raises(ValueError, match="has 2 turns, and `turn_rewards` 1; give its node as many `turns`"):
        turns(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), **own)


def test_observations_are_what_answered_the_policy() -> None:
    own = columns([[(2, [1, 2]), (1, [])], []])
    found = observations(own["turn"], own["loss_mask"])
    assert found.tolist() == [[False, False, False, False, True, True, False], [False, False]]


def test_a_group_in_which_the_policy_wrote_nothing_has_no_advantage() -> None:
    talk = columns([[(2, [])], [(2, [])]])
    loss_mask = Ragged.of([[False, False, True, True], [False] * 4], torch.bool)
    made = turns(torch.tensor([1.0, 0.0]), None, torch.tensor([0, 1]), **talk | {"loss_mask": loss_mask})
    assert made[1].tolist() == [0.0] * 4
