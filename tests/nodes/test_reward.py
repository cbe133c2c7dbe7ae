"""Rewards: exact, mathematical, and a KL penalty a token."""

import pytest
import torch

from rlgraph.nodes.reward.math import math
from rlgraph.nodes.reward.shaping import kl_penalty, overlong
from rlgraph.nodes.reward.text import exact
from rlgraph.nodes.reward.verifier import Verifier
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=0)


def test_exact_ignores_only_white_space_at_the_ends() -> None:
    ctx = context()
    assert exact(ctx, ["46", " 46\n", "4 6", ""], ["46"] * 4).tolist() == [1, 1, 0, 0]
    assert ctx.metrics == {"reward/mean": (2.0, 4)}


RIGHT = [
    ("Natalia sold 48+24 = 72 clips altogether.\n#### 72", "72"),
    ("The answer is 1,000.", "1000"),
    ("The answer is $1000.", "1,000"),
    ("so she has \\boxed{18} eggs, 9 more than before", "18"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("that is 1/2", "\\frac{1}{2}"),
    ("it costs $18.00$", "18"),
    ("\\boxed{1 + x^2}", "x^2+1"),
    ("-3", "-3"),
]


def test_math_accepts_equal_answers() -> None:
    responses, answers = zip(*RIGHT, strict=True)
    assert math(context(), list(responses), list(answers)).tolist() == [1.0] * len(RIGHT)


def test_math_refuses_wrong_and_unparsable_answers() -> None:
    ctx = context()
    responses = ["\\boxed{17}", "no idea", "", "18, or rather 19"]
    assert math(ctx, responses, ["18"] * 4).tolist() == [0.0] * 4
    assert ctx.metrics == {"reward/mean": (0.0, 4), "reward/unparsed": (2.0, 4), "reward/late": (0.0, 4)}


@pytest.mark.nightly
def test_math_counts_and_logs_what_it_can_not_judge_in_time(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context()
    assert math(ctx, ["2", "\\boxed{9^{9^{9^{9}}}}"], ["2", "2"], timeout=8.0).tolist() == [1.0, 0.0]
    assert ctx.metrics == {"reward/mean": (1.0, 2), "reward/unparsed": (0.0, 2), "reward/late": (1.0, 2)}
    assert "1 of 2 responses took too long to judge; the first: \\boxed{9^{9^{9^{9}}}}" in caplog.text


def test_a_runaway_answer_is_stopped_and_the_next_is_judged() -> None:
    verifier = Verifier()
    endless = ("\\boxed{9^{9^{9^{9}}}}", "2")
    assert verifier.judge([endless], timeout=0.3) == ["late"]
    assert verifier.judge([("2", "2")], timeout=30.0) == ["right"]
    verifier.close()


def test_math_judges_strings_with_line_breaks_and_quotes() -> None:
    assert math(context(), ['line "one"\nline two\u2028 7'], ["7"]).tolist() == [1.0]


def kl_case() -> tuple[torch.Tensor, Ragged, Ragged, Ragged]:
    mask = Ragged.of([[False, True, True, False], [False], [True]], torch.bool)
    old = mask.like(torch.tensor([0.0, -1.0, -2.0, 0.0, 0.0, -1.0]))
    ref = mask.like(torch.tensor([0.0, -2.0, -1.0, 0.0, 0.0, -1.5]))
    return torch.tensor([1.0, 5.0, -1.0]), old, ref, mask


def test_kl_penalty_by_hand() -> None:
    ctx = context()
    out = kl_penalty(ctx, *kl_case(), beta=0.1, kl="k1")
    # the score stands on the last token that the policy wrote; the empty response keeps none
    assert out.tolist() == [pytest.approx([0.0, -0.1, 1.1, 0.0]), [0.0], pytest.approx([-1.05])]
    assert ctx.metrics["kl/ref"] == (pytest.approx(0.5), 3)


@pytest.mark.parametrize(("kind", "total"), [("k1", 0.5), ("k2", 1.125), ("abs", 2.5)])
def test_kl_penalty_costs_beta_times_the_kl(kind: str, total: float) -> None:
    free, paid = (kl_penalty(context(), *kl_case(), beta=beta, kl=kind) for beta in (0.0, 2.0))
    assert (free.values - paid.values).sum().item() == pytest.approx(2.0 * total)


def test_kl_penalty_of_no_response_at_all() -> None:
    nothing = Ragged.of([[False, False], []], torch.bool)
    zeros = nothing.like(torch.zeros(2))
    assert kl_penalty(context(), torch.ones(2), zeros, zeros, nothing).tolist() == [[0.0, 0.0], []]


def test_overlong_is_linear_over_the_last_tokens_of_the_limit() -> None:
    lengths = [0, 6, 7, 8, 10, 12]
    loss_mask = Ragged.of([[False, *[True] * length] for length in lengths], torch.bool)
    ctx = context()
    out = overlong(ctx, torch.ones(6), loss_mask, limit=10, buffer=4, penalty=2.0)
    # nothing up to 6 tokens, then a quarter of the penalty a token, and all of it from 10 on
    assert out.tolist() == [1.0, 1.0, 0.5, 0.0, -1.0, -1.0]
    assert ctx.metrics == {"reward/overlong": (5.5, 6)}


def test_overlong_counts_what_the_policy_wrote() -> None:
    tool = Ragged.of([[True, False, False, False, True]], torch.bool)
    assert overlong(context(), torch.ones(1), tool, limit=4, buffer=1).tolist() == [1.0]
    nothing = Ragged.of([], torch.bool)
    assert overlong(context(), torch.zeros(0), nothing, limit=4, buffer=1).tolist() == []
