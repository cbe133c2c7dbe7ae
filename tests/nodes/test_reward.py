"""Rewards: exact, mathematical, and a KL penalty a token."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from recorded import means
from rlgraph.nodes.reward.math import math
from rlgraph.nodes.reward.per_sample import record_late
from rlgraph.nodes.reward.shaping import kl_penalty, overlong, per_sample
from rlgraph.nodes.reward.text import exact
from rlgraph.nodes.reward.verifier import Verifier
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=0)


def test_exact_ignores_only_white_space_at_the_ends() -> None:
    ctx = context()
    assert exact(ctx, ["46", " 46\n", "4 6", ""], ["46"] * 4).tolist() == [1, 1, 0, 0]
    assert means(ctx) == {"reward/mean": (2.0, 4)}


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
    fractions = {"reward/unevaluated": (0.0, 4), "reward/unparsed": (2.0, 4), "reward/late": (0.0, 4)}
    assert means(ctx) == {"reward/mean": (0.0, 4), **fractions}


# a response that repeats a question, and the answer
ECHOES = [
    ("12*13", "156"),
    ("\\boxed{12 \\times 13}", "156"),
    ("\\boxed{12×13}", "156"),
    ("\\boxed{x = 12 \\cdot 13}", "156"),
    ("\\boxed{\\sum_{k=1}^{12} 13}", "156"),
    ("\\boxed{156 + x - x}", "156"),
    ("\\boxed{(12)(13)}", "156"),  # Math-Verify adds them up
    ("\\boxed{156/12}", "13"),
    ("\\boxed{156:12}", "13"),
    ("7-10", "-3"),
    ("\\boxed{\\sqrt{16}}", "4"),
    ("\\boxed{|-3|}", "3"),
    ("\\boxed{2^{10}}", "1024"),
    ("\\boxed{5!}", "120"),
    ("\\boxed{\\binom{5}{2}}", "10"),
    ("\\boxed{\\frac{3}{4} \\cdot \\frac{2}{3}}", "\\frac{1}{2}"),
    ("\\boxed{1.5/3}", "0.5"),
    ("\\boxed{\\{1+1, 4\\}}", "\\{2, 4\\}"),
    ("\\boxed{3x+4x}", "7x"),
]


def test_an_answer_that_has_still_to_be_computed_is_wrong_unless_the_graph_says_so() -> None:
    ctx = context()
    responses, answers = map(list, zip(*ECHOES, strict=True))
    assert math(ctx, responses, answers).tolist() == [0.0] * len(ECHOES)
    assert means(ctx)["reward/unevaluated"] == (len(ECHOES), len(ECHOES))
    assert math(context(), responses, answers, unevaluated=True).tolist() == [1.0] * len(ECHOES)


FINISHED = [
    ("\\boxed{-\\frac{1}{2}}", "-0.5"),
    ("\\boxed{1\\frac{1}{2}}", "1.5"),
    ("\\boxed{50\\%}", "0.5"),
    ("\\boxed{2^{100}}", "2^{100}"),
    ("\\boxed{3\\times 10^8}", "3\\times 10^8"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
    ("\\boxed{\\frac34\\pi}", "\\frac{3\\pi}{4}"),
    ("\\boxed{\\frac{1+\\sqrt{5}}{2}}", "\\frac{1+\\sqrt5}{2}"),
    ("\\boxed{(-\\infty,-2] \\cup [3, 4)}", "(-\\infty,-2]\\cup[3,4)"),
    ("\\boxed{\\begin{bmatrix}-1&2\\\\3&4\\end{bmatrix}}", "\\begin{pmatrix}-1&2\\\\3&4\\end{pmatrix}"),
    ("\\boxed{12 \\cdot 13 = 156}", "156"),
    ("\\boxed{90^\\circ}", "90"),
    ("\\boxed{(x+1)(x-1)}", "x^2-1"),
    ("\\boxed{2(x+3)}", "2x+6"),
    ("\\boxed{\\text{Monday}}", "\\text{Monday}"),
]


def test_an_answer_in_another_form_is_right() -> None:
    responses, answers = map(list, zip(*FINISHED, strict=True))
    assert math(context(), responses, answers).tolist() == [1.0] * len(FINISHED)


ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


@pytest.mark.slow
def test_math_counts_and_logs_what_it_can_not_judge_in_time(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context()
    assert math(ctx, ["no idea", ENDLESS], ["2", "2"], timeout=2.0).tolist() == [0.0, 0.0]
    assert means(ctx)["reward/unparsed"] == (1.0, 2) and means(ctx)["reward/late"] == (1.0, 2)
    assert f"1 of 2 responses took too long to judge; the first, of sample 1: {ENDLESS}" in caplog.text


def test_what_is_logged_of_a_response_does_not_steer_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    record_late(context(), [True], ["\x1b]0;mine\x07 \x1b[2J \x9b2J \r \u202e \ud800"])
    assert r"the first, of sample 0: \x1b]0;mine\x07 \x1b[2J \x9b2J \r \u202e \ud800" in caplog.text
    record_late(context(), [True], ["x" * 5000])
    assert "... (5,000 characters in all) ..." in caplog.text and len(caplog.text) < 3000


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    verifier = Verifier(parallel=4, memory=2**30)
    yield verifier
    verifier.close()


@pytest.mark.slow
def test_answers_that_never_end_are_ended_at_the_same_time_and_the_next_are_judged(
    verifier: Verifier,
) -> None:
    assert verifier.judge([("2", "2")], timeout=60.0) == ["right"]
    start = time.monotonic()
    assert verifier.judge([(ENDLESS, "2")] * 4, timeout=1.5) == ["late"] * 4
    assert time.monotonic() - start < 4 * 1.5  # one after the other they take this long at least
    assert verifier.judge([("2", "2"), ("3", "2")] * 4, timeout=60.0) == ["right", "wrong"] * 4


@pytest.mark.slow
def test_an_answer_gets_no_more_memory_than_it_may_take() -> None:
    verifier, start = Verifier(parallel=1, memory=2**28), time.monotonic()
    first, second = verifier.judge([("\\boxed{2^{2^{60}}}", "1"), ("2", "2")], timeout=600.0)
    verifier.close()
    assert (first in ("late", "wrong"), second) == (True, "right")
    assert time.monotonic() - start < 300  # its time was not up


def test_a_verifier_whose_processes_are_ended_is_started_again(verifier: Verifier) -> None:
    assert verifier.judge([("2", "2")], timeout=60.0) == ["right"]
    assert verifier.server
    os.killpg(verifier.server.pid, signal.SIGKILL)
    assert verifier.judge([("2", "2")] * 5, timeout=60.0) == ["right"] * 5


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
    assert means(ctx)["kl/ref"] == (pytest.approx(0.5), 3)


@pytest.mark.parametrize(("kind", "total"), [("k1", 0.5), ("k2", 1.125), ("abs", 2.5)])
def test_kl_penalty_costs_beta_times_the_kl(kind: str, total: float) -> None:
    free, paid = (kl_penalty(context(), *kl_case(), beta=beta, kl=kind) for beta in (0.0, 2.0))
    assert (free.values - paid.values).sum().item() == pytest.approx(2.0 * total)


def test_without_beta_the_score_alone_stands_on_the_last_token() -> None:
    rewards, _, _, mask = kl_case()
    ctx = context()
    assert kl_penalty(ctx, rewards, None, None, mask, beta=0.0).tolist() == [
        [0.0, 0.0, 1.0, 0.0],
        [0.0],
        [-1.0],
    ]
    assert "kl/ref" not in ctx.metrics


def test_a_reward_per_sample_is_the_score_less_the_kl_of_the_response() -> None:
    rewards, old, ref, mask = kl_case()
    shaped = kl_penalty(context(), rewards, old, ref, mask, beta=0.1, kl="k1")
    # the KLs are 1 - 1 = 0 and 0.5 nats; the empty response keeps no score
    assert per_sample(shaped, mask).tolist() == pytest.approx([1.0, 0.0, -1.05])
    outside = mask.like(torch.full((6,), 9.0))
    assert per_sample(outside, mask).tolist() == [18.0, 0.0, 9.0]


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
    assert means(ctx) == {"reward/overlong": (5.5, 6)}


def test_overlong_counts_what_the_policy_wrote() -> None:
    tool = Ragged.of([[True, False, False, False, True]], torch.bool)
    assert overlong(context(), torch.ones(1), tool, limit=4, buffer=1).tolist() == [1.0]
    nothing = Ragged.of([], torch.bool)
    assert overlong(context(), torch.zeros(0), nothing, limit=4, buffer=1).tolist() == []
