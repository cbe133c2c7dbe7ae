"""Pass@k, several rewards and a teacher: advantages against slow references written from the formulas."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from recorded import means
from rlgraph.nodes.advantage.gae import distill
from rlgraph.nodes.advantage.group import gdpo, grpo_passk
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context

# rows: of two groups and of one alone; one has nothing in its loss mask, one is empty
MASK = [[False, True, True, False, True], [False, True], [False, False], [True, False, True], [], [True] * 4]
REWARDS = [1.0, 0.0, 0.5, 0.25, 3.0, 0.75]
OTHER = [0.0, 1.0, 1.0, 0.0, -1.0, 0.0]
GROUP = [7, 2, 7, 2, 5, 7]
FOUR = Ragged.of([[True]] * 4)

Numbers = list[float]


def mask() -> Ragged:
    return Ragged.of(MASK, torch.bool)


def over_tokens(numbers: Numbers) -> list[Numbers]:
    return [[n if w else 0.0 for w in written] for n, written in zip(numbers, MASK, strict=True)]


def own_group(rewards: Numbers, group: list[int], sample: int) -> Numbers:
    return [reward for reward, g in zip(rewards, group, strict=True) if g == group[sample]]


def slow_passk(rewards: Numbers, group: list[int], scale: bool) -> Numbers:
    out = []
    for sample, reward in enumerate(rewards):
        own = sorted(own_group(rewards, group, sample), reverse=True)
        second = own[1] if len(own) > 1 else 0.0
        deviation = (statistics.stdev(own) if len(own) > 1 else 1.0) + 1e-6
        best = (reward == own[0] and reward > second) or len(own) == 1
        out.append((reward - second) / (deviation if scale else 1.0) if best else 0.0)
    return out


def slow_grpo(rewards: Numbers, group: list[int]) -> Numbers:
    out = []
    for sample, reward in enumerate(rewards):
        own = own_group(rewards, group, sample)
        alone = len(own) == 1
        mean, deviation = (0.0, 1.0) if alone else (statistics.mean(own), statistics.stdev(own))
        out.append((reward - mean) / (deviation + 1e-6))
    return out


def slow_gdpo(columns: list[Numbers], weights: Numbers, group: list[int]) -> list[Numbers]:
    parts = [slow_grpo(column, group) for column in columns]
    sums = [sum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in range(len(group))]
    kept = [n for n, written in zip(sums, MASK, strict=True) for w in written if w]
    mean, deviation = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    return over_tokens([(n - mean) / deviation for n in sums])


@pytest.mark.parametrize("group", [GROUP, [0] * 6, [1, 1, 2, 2, 3, 3], [5, 4, 3, 2, 1, 0]])
@pytest.mark.parametrize("scale", [True, False])
def test_passk_is_its_formula(group: list[int], scale: bool) -> None:
    out = grpo_passk(torch.tensor(REWARDS), torch.tensor(group), mask(), scale=scale)
    for row, expected in enumerate(over_tokens(slow_passk(REWARDS, group, scale))):
        assert out[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert out.values.dtype == torch.float32


def test_passk_by_hand() -> None:
    group = torch.zeros(4, dtype=torch.int64)
    lone = grpo_passk(torch.tensor([0.0, 1.0, 0.0, 0.0]), group, FOUR)
    assert lone.values.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0], rel=1e-5)  # 1 / (1/2)
    both_right = grpo_passk(torch.tensor([0.0, 1.0, 1.0, 0.0]), group, FOUR)
    assert both_right.values.tolist() == [0.0] * 4
    assert grpo_passk(torch.full((4,), 0.1), group, FOUR).values.tolist() == [0.0] * 4


@pytest.mark.parametrize("group", [GROUP, [0] * 6])
@pytest.mark.parametrize("weights", [[1.0, 0.5], [0.2, -3.0]])
def test_gdpo_is_its_formula(group: list[int], weights: Numbers) -> None:
    rewards, other = torch.tensor(REWARDS), torch.tensor(OTHER)
    options = {"weight": weights[0], "weight_2": weights[1]}
    out = gdpo(rewards, other, None, None, torch.tensor(group), mask(), **options)
    for row, expected in enumerate(slow_gdpo([REWARDS, OTHER], weights, group)):
        assert out[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gdpo_of_four_rewards_weighs_each() -> None:
    columns = [REWARDS, OTHER, [x * x for x in REWARDS], [-x for x in OTHER]]
    weights = [1.0, 2.0, 0.5, 0.25]
    options = {f"weight_{k}": weights[k - 1] for k in (2, 3, 4)}
    out = gdpo(*map(torch.tensor, columns), torch.tensor(GROUP), mask(), weight=1.0, **options)
    for row, expected in enumerate(slow_gdpo(columns, weights, GROUP)):
        assert out[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gdpo_tells_apart_what_a_sum_does_not_by_hand() -> None:
    # sums 1, 1, 0, 0 would be one advantage for the first two; the second reward is rarer, so it counts more
    group = torch.zeros(4, dtype=torch.int64)
    frequent, rare = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    out = gdpo(frequent, rare, None, None, group, FOUR).values
    by_frequent, by_rare = math.sqrt(3) / 2, 0.5  # (s - mu) / sigma: +-0.5 / 0.577; 0.75 or -0.25 / 0.5
    sums = torch.tensor(
        [by_frequent - by_rare, 1.5 - by_frequent, by_frequent - by_rare, -by_frequent - by_rare]
    )
    torch.testing.assert_close(out, (sums - sums.mean()) / sums.std(), atol=1e-5, rtol=1e-5)


def test_neither_depends_on_the_order_of_rows() -> None:
    order = torch.tensor([3, 5, 4, 0, 2, 1])
    rewards, other, group = torch.tensor(REWARDS), torch.tensor(OTHER), torch.tensor(GROUP)
    for estimate in (
        lambda take: grpo_passk(take(rewards), take(group), mask().take(take(torch.arange(6)))),
        lambda take: gdpo(
            take(rewards), take(other), None, None, take(group), mask().take(take(torch.arange(6)))
        ),
    ):
        moved, out = estimate(lambda column: column[order]), estimate(lambda column: column)
        torch.testing.assert_close(moved.values, out.take(order).values)


def test_of_no_rows_and_of_no_tokens() -> None:
    none, nothing = torch.zeros(0), Ragged.of([[False, False], []], torch.bool)
    rows = torch.zeros(0, dtype=torch.int64)
    assert grpo_passk(none, rows, Ragged.of([], torch.bool)).tolist() == []
    assert gdpo(none, none, None, None, rows, Ragged.of([], torch.bool)).tolist() == []
    two, group = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])
    assert grpo_passk(two, group, nothing).tolist() == [[0.0, 0.0], []]
    assert gdpo(two, two, None, None, group, nothing).tolist() == [[0.0, 0.0], []]


def test_distill_by_hand() -> None:
    rows = Ragged.of([[False, True, True], [], [True]], torch.bool)
    teacher, student = (
        rows.like(torch.tensor(x)) for x in ([9.0, -1.0, -2.0, -0.5], [0.0, -3.0, -1.0, -0.5])
    )
    ctx = Context(node="advantages", seed=0, iteration=0)
    assert distill(ctx, teacher, student, rows).tolist() == [[0.0, 2.0, -1.0], [], [0.0]]
    assert means(ctx) == {"advantages/kl": (-1.0, 3)}


@pytest.mark.parametrize("coef", [0.5, 2.0])
def test_a_drifting_prefix_weighs_less_by_its_formula(coef: float) -> None:
    draw = torch.Generator().manual_seed(1)
    teacher, student = (mask().like(torch.randn(16, generator=draw)) for _ in range(2))
    out = distill(Context("advantages", 0, 0), teacher, student, mask(), prefix_coef=coef)
    for row, written in enumerate(MASK):
        gaps = [
            a - b if w else 0.0
            for a, b, w in zip(teacher[row].tolist(), student[row].tolist(), written, strict=True)
        ]
        total = sum(map(abs, gaps))
        before = [sum(map(abs, gaps[:place])) for place in range(len(gaps))]
        expected = [g * (1 + coef * (1 - b / total)) if g else 0.0 for g, b in zip(gaps, before, strict=True)]
        assert out[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_student_like_its_teacher_has_no_drift() -> None:
    same = mask().like(torch.ones(16))
    assert distill(Context("a", 0, 0), same, same, mask(), prefix_coef=0.5).values.eq(0).all()


def test_distillation_goes_down_the_kl_to_the_teacher() -> None:
    # expected over all tokens, the loss of these advantages has the gradient of KL(student, teacher)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    rows = Ragged.of([[True]] * 5)
    ctx = Context(node="advantages", seed=0, iteration=0)
    advantages = distill(ctx, rows.like(teacher), rows.like(student.detach()), rows).values.double()
    loss = -(student.exp().detach() * advantages * student).sum()
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected, atol=1e-6, rtol=1e-6)


def test_a_token_that_the_teacher_excludes_shows_in_its_own_row_alone() -> None:
    teacher, student = [[-math.inf, -1.0], [-1.0, -2.0]], [[-1.0, -1.0], [-1.5, -1.0]]
    columns = [Ragged.of(rows, torch.float32) for rows in (teacher, student)]
    loss_mask = Ragged.of([[True, True], [True, True]], torch.bool)
    made = distill(Context("distill", 0, 0, range(2), 2), *columns, loss_mask)
    assert made[1].tolist() == [0.5, -1.0]
