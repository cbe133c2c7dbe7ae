"""DPO as weights a token: against its loss written out, on pairs that lie in any order and micro-batch."""

from __future__ import annotations

import math

import pytest
import torch

from recorded import means
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.nodes.loss.policy import aggregate
from rlgraph.nodes.loss.preference import dpo_weights, preference
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Totals

LENGTHS = [3, 5, 2, 0, 4, 4]
CHOSEN = [True, False, False, True, True, False]
GROUP = [4, 4, 9, 9, 1, 1]


def context() -> Context:
    return Context(node="preference", seed=0, iteration=0)


def case(seed: int = 0) -> tuple[Ragged, Ragged, Ragged, torch.Tensor, torch.Tensor]:
    """Log-probs, the reference's, a loss mask that leaves out each row's first token, and the pairs."""
    draw = torch.Generator().manual_seed(seed)
    mask = Ragged.of([[token > 0 for token in range(length)] for length in LENGTHS], torch.bool)
    lp, ref = (
        mask.like(torch.randn(sum(LENGTHS), generator=draw, dtype=torch.float64) * mask.values)
        for _ in range(2)
    )
    return lp, ref, mask, torch.tensor(CHOSEN), torch.tensor(GROUP)


def slow_dpo(flat: torch.Tensor, lp: Ragged, ref: Ragged, beta: float) -> torch.Tensor:
    """The mean over pairs of -log sigmoid(beta ((lp_w - ref_w) - (lp_l - ref_l)))."""
    rows = lp.like(flat)
    losses = []
    for group in sorted(set(GROUP)):
        won, lost = (
            next(row for row in range(6) if GROUP[row] == group and CHOSEN[row] is side)
            for side in (True, False)
        )
        margin = (rows[won].sum() - ref[won].sum()) - (rows[lost].sum() - ref[lost].sum())
        losses.append((1 + (-beta * margin).exp()).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_is_that_of_dpo(beta: float, seed: int) -> None:
    lp, ref, mask, chosen, group = case(seed)
    ctx = context()
    weights, _ = dpo_weights(ctx, lp, ref, mask, chosen, group, None, beta=beta)
    values = lp.values.clone().requires_grad_()
    totals = Totals(tokens=int(mask.values.sum()), sequences=6)
    loss = aggregate(preference(lp.like(values), weights), mask, totals, "seq-mean-token-sum")
    (gradient,) = torch.autograd.grad(loss, values)
    steps = torch.eye(len(values), dtype=torch.float64) * 1e-6
    differences = torch.stack(
        [slow_dpo(lp.values + s, lp, ref, beta) - slow_dpo(lp.values - s, lp, ref, beta) for s in steps]
    )
    torch.testing.assert_close(gradient, differences / 2e-6 * mask.values, atol=1e-6, rtol=1e-5)
    total, count = means(ctx)["preference/loss"]
    assert total / count == pytest.approx(slow_dpo(lp.values, lp, ref, beta).item())


def test_micro_batches_that_part_a_pair_give_the_same_gradient() -> None:
    lp, ref, mask, chosen, group = case(2)
    weights, _ = dpo_weights(context(), lp, ref, mask, chosen, group, None)
    totals = Totals(tokens=int(mask.values.sum()), sequences=6)
    whole = aggregate(preference(lp, weights), mask, totals, "seq-mean-token-sum")
    parts = [
        aggregate(
            preference(lp.take(rows), weights.take(rows)), mask.take(rows), totals, "seq-mean-token-sum"
        )
        for rows in map(torch.tensor, ([0, 3, 5], [4], [1, 2]))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_by_hand() -> None:
    # m = 0.5 ((-1 - -2) - (-3 - -2)) = 1
    mask = Ragged.of([[False, True], [True, True]], torch.bool)
    lp, ref = (mask.like(torch.tensor(x)) for x in ([0.0, -1.0, -1.0, -2.0], [0.0, -2.0, -1.0, -1.0]))
    ctx = context()
    out, preferred = dpo_weights(
        ctx, lp, ref, mask, torch.tensor([True, False]), torch.tensor([0, 0]), None, beta=0.5
    )
    assert preferred.tolist() == [1.0, 1.0]
    weight = 2 * 0.5 / (1 + math.e)
    assert out.tolist() == [pytest.approx([0.0, weight]), pytest.approx([-weight, -weight])]
    assert means(ctx) == {
        "preference/loss": (pytest.approx(math.log(1 + math.exp(-1))), 1),
        "preference/margin": (pytest.approx(1.0), 1),
        "preference/accuracy": (1.0, 1),
    }


def test_the_order_of_rows_does_not_matter() -> None:
    lp, ref, mask, chosen, group = case(3)
    order = torch.tensor([5, 0, 3, 2, 1, 4])
    moved, order_of = dpo_weights(
        context(), lp.take(order), ref.take(order), mask.take(order), chosen[order], group[order], None
    )
    out, preferred = dpo_weights(context(), lp, ref, mask, chosen, group, None)
    torch.testing.assert_close(moved.values, out.take(order).values)
    assert order_of.equal(preferred[order])


def test_a_pair_that_is_not_whole_has_no_weight() -> None:
    lp, ref, mask, chosen, group = case(4)
    left = torch.tensor([0, 2, 3, 4, 5])  # row 1 was filtered
    ctx = context()
    out, preferred = dpo_weights(
        ctx, lp.take(left), ref.take(left), mask.take(left), chosen[left], group[left], None
    )
    whole, _ = dpo_weights(context(), lp, ref, mask, chosen, group, None)
    assert out[0].tolist() == [0.0] * 3 and preferred[0] == 0
    assert out.tolist()[1:] == whole.take(left).tolist()[1:]
    assert means(ctx)["preference/loss"][1] == 2
    both_chosen, _ = dpo_weights(context(), lp, ref, mask, torch.ones(6, dtype=torch.bool), group, None)
    assert both_chosen.values.eq(0).all()


def test_of_no_rows() -> None:
    nothing = Ragged.of([], torch.bool)
    zeros, ints = nothing.like(torch.zeros(0)), torch.zeros(0, dtype=torch.int64)
    weights, preferred = dpo_weights(context(), zeros, zeros, nothing, ints.bool(), ints, None)
    assert weights.tolist() == preferred.tolist() == []


def test_margins_far_apart_are_survived() -> None:
    mask = Ragged.of([[True], [True]])
    lp, ref = mask.like(torch.tensor([1e4, -1e4])), mask.like(torch.zeros(2))
    for chosen in ([True, False], [False, True]):
        ctx = context()
        out, _ = dpo_weights(ctx, lp, ref, mask, torch.tensor(chosen), torch.tensor([0, 0]), None, beta=1.0)
        assert out.values.isfinite().all() and math.isfinite(means(ctx)["preference/loss"][0])


def test_a_second_step_would_follow_another_gradient() -> None:
    """Which is why `check` refuses one: after a long step in DPO's direction its own gradient has faded."""
    lp, ref, mask, chosen, group = case()
    before, _ = dpo_weights(context(), lp, ref, mask, chosen, group, None, beta=1.0)
    moved = lp.like(lp.values + 3 * before.values.double())
    after, _ = dpo_weights(context(), moved, ref, mask, chosen, group, None, beta=1.0)
    written = mask.values
    assert (after.values[written].abs() < 0.5 * before.values[written].abs()).all()
    values = moved.values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(preference(lp.like(values), before).values.sum(), values)
    assert torch.equal(gradient, -before.values.double()), "what it would follow has not changed"


@pytest.mark.parametrize("setting", ["update_policy.minibatches=2", "update_policy.epochs=3"])
def test_more_optimizer_steps_are_refused(setting: str) -> None:
    with pytest.raises(GraphError) as caught:
        compile_graph("dpo", ["pairs.files=[pairs.jsonl]", setting], 1)
    said = str(caught.value)
    assert f"it makes {setting[-1]} optimizer steps" in said
    assert "set: {update_policy.minibatches: 1, update_policy.epochs: 1}" in said
    compile_graph("dpo", ["pairs.files=[pairs.jsonl]"], 1)
