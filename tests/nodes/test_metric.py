"""pass@k and mean@k of each source."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from recorded import means
from rlgraph.errors import RunError
from rlgraph.nodes.select.metric import estimate, mean_at_k, pass_at_k
from rlgraph.ops import Context


def context() -> Context:
    return Context(node="solved", seed=0, iteration=0)


@pytest.mark.parametrize("tried", range(1, 8))
def test_the_estimate_is_the_share_of_draws_that_solve(tried: int) -> None:
    for solved in range(tried + 1):
        for k in range(1, tried + 1):
            draws = [any(i < solved for i in draw) for draw in combinations(range(tried), k)]
            assert estimate(tried, solved, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_large_counts_do_not_overflow() -> None:
    exact = 1 - math.comb(9000, 500) / math.comb(10000, 500)
    assert estimate(10000, 1000, 500) == pytest.approx(exact, rel=1e-9)


def test_each_sample_has_its_questions_chance_and_each_source_its_mean() -> None:
    ctx = context()
    rewards = torch.tensor([1.0, 0, 0, 0, 0.5, 0.6, 0.7, 0, 0, 0, 0, 0])
    group = torch.tensor([3] * 4 + [5] * 4 + [7] * 4)
    sources = ["a"] * 4 + ["b/c"] * 4 + ["a"] * 4
    values = pass_at_k(ctx, rewards, group, sources, k=2)
    assert values.tolist() == pytest.approx([1 / 2] * 4 + [5 / 6] * 4 + [0.0] * 4)
    assert {name: total / count for name, (total, count) in means(ctx).items()} == pytest.approx(
        {"solved/a": 1 / 4, "solved/b/c": 5 / 6}
    )


def test_more_tries_than_samples_are_refused() -> None:
    with pytest.raises(RunError, match="solved: k is 3, and a question has 2 samples"):
        pass_at_k(context(), torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), None, k=3)


def test_a_mean_is_of_the_rewards_themselves() -> None:
    ctx = context()
    rewards = torch.tensor([1.0, 2.0, 4.0])
    assert mean_at_k(ctx, rewards, ["a", "b", "b"]) is rewards
    assert means(ctx) == {"solved/a": (1.0, 1), "solved/b": (6.0, 2)}
    mean_at_k(ctx, rewards, None)
    assert means(ctx)["solved/a"] == (1.0, 1)


def test_a_mean_is_of_truth_values_and_whole_numbers_too_and_of_no_texts() -> None:
    ctx = context()
    assert mean_at_k(ctx, torch.tensor([True, False, True]), ["a", "b", "b"]).tolist() == [1.0, 0.0, 1.0]
    assert means(ctx) == {"solved/a": (1.0, 1), "solved/b": (1.0, 2)}
    assert mean_at_k(ctx, torch.tensor([3]), None).dtype == torch.float32
    with pytest.raises(RunError, match="a mean is of numbers or truth values"):
        mean_at_k(ctx, ["3"], None)
