"""SimPO, ORPO, KTO and reward models against their losses written out, whose gradients are differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from recorded import means
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.nodes.loss.policy import aggregate
from rlgraph.nodes.loss.preference import (
    kto_weights,
    mismatched,
    orpo_weights,
    preference,
    reward_weights,
    simpo_weights,
)
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Totals

# pairs that lie in any order; rows of a token that is not learnt, and some
LENGTHS = [3, 5, 2, 4, 4, 6]
CHOSEN, GROUP = [True, False, False, True, True, False], [4, 4, 9, 9, 1, 1]
PAIRS = [(0, 1), (3, 2), (4, 5)]  # rows of each, the chosen one first
TOTALS = Totals(tokens=sum(LENGTHS) - 6, sequences=6)

Numbers = list[list[float]]
Loss = Callable[[Numbers], float]


def mask() -> Ragged:
    return Ragged.of([[token > 0 for token in range(length)] for length in LENGTHS], torch.bool)


def logprobs(seed: int) -> Ragged:
    draw = torch.Generator().manual_seed(seed)
    return mask().like(-torch.rand(sum(LENGTHS), generator=draw, dtype=torch.float64) * 2 * mask().values)


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(CHOSEN), torch.tensor(GROUP)


def context() -> Context:
    return Context(node="preference", seed=0, iteration=0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def written(lp: Numbers, row: int) -> list[float]:
    return lp[row][1:]


def mean(lp: Numbers, row: int) -> float:
    return sum(written(lp, row)) / len(written(lp, row))


def slow_simpo(lp: Numbers) -> float:
    margins = [2.5 * (mean(lp, won) - mean(lp, lost)) - 0.7 for won, lost in PAIRS]
    return sum(-math.log(sigmoid(m)) for m in margins) / len(PAIRS)


def odds(lp: Numbers, row: int) -> float:
    p = math.exp(mean(lp, row))
    return math.log(p / (1 - p))


def slow_orpo(lp: Numbers, coef: float = 0.5) -> float:
    told = [-math.log(sigmoid(odds(lp, won) - odds(lp, lost))) for won, lost in PAIRS]
    return sum(-mean(lp, won) + coef * loss for (won, _), loss in zip(PAIRS, told, strict=True)) / len(PAIRS)


REF, KL, KL_REF = (logprobs(seed) for seed in (10, 11, 12))


def slow_kto(lp: Numbers, kl: Ragged = KL) -> float:
    drift = sum(sum(written(kl.tolist(), r)) - sum(written(KL_REF.tolist(), r)) for r in range(6)) / 6
    losses = []
    for row, good in enumerate(CHOSEN):
        gain = sum(written(lp, row)) - sum(written(REF.tolist(), row))
        u = 0.3 * (gain - max(drift, 0.0))
        losses.append(1.5 * (1 - sigmoid(u)) if good else 0.5 * (1 - sigmoid(-u)))
    return sum(losses) / 6


def simpo(ctx: Context, lp: Ragged) -> Ragged:
    return simpo_weights(ctx, lp, mask(), *pairs(), beta=2.5, margin=0.7).preference


def orpo(ctx: Context, lp: Ragged) -> Ragged:
    return orpo_weights(ctx, lp, mask(), *pairs(), coef=0.5).preference


def kto(ctx: Context, lp: Ragged, kl: Ragged = KL) -> Ragged:
    options = {"beta": 0.3, "weight": 1.5, "weight_undesirable": 0.5}
    return kto_weights(ctx, lp, REF, mask(), kl, KL_REF, mask(), pairs()[0], **options)


KINDS = {simpo: slow_simpo, orpo: slow_orpo, kto: slow_kto}
each = pytest.mark.parametrize("kind", KINDS)


def gradient(weights: Ragged, lp: Ragged) -> torch.Tensor:
    values = lp.values.clone().requires_grad_()
    losses = preference(lp.like(values), weights)
    return torch.autograd.grad(aggregate(losses, mask(), TOTALS, "seq-mean-token-sum"), values)[0]


def differences(loss: Loss, lp: Ragged) -> torch.Tensor:
    steps = torch.eye(len(lp.values), dtype=torch.float64) * 1e-6
    found = [
        (loss(lp.like(lp.values + s).tolist()) - loss(lp.like(lp.values - s).tolist())) / 2e-6 for s in steps
    ]
    return torch.tensor(found, dtype=torch.float64) * mask().values


@each
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_loss(kind: Callable[..., Ragged], seed: int) -> None:
    lp = logprobs(seed)
    weights = kind(context(), lp)
    torch.testing.assert_close(gradient(weights, lp), differences(KINDS[kind], lp), atol=1e-6, rtol=1e-5)
    assert weights.values.dtype == torch.float32 and weights.values[~mask().values].eq(0).all()


@each
def test_micro_batches_that_part_pairs_add_up(kind: Callable[..., Ragged]) -> None:
    lp = logprobs(3)
    weights = kind(context(), lp)
    whole = aggregate(preference(lp, weights), mask(), TOTALS, "seq-mean-token-sum")
    parts = [
        aggregate(preference(lp.take(r), weights.take(r)), mask().take(r), TOTALS, "seq-mean-token-sum")
        for r in map(torch.tensor, ([0, 3, 5], [4], [1, 2]))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_what_is_recorded_is_the_loss() -> None:
    lp = logprobs(4)
    for kind, slow in ((simpo, slow_simpo), (kto, slow_kto)):
        ctx = context()
        kind(ctx, lp)
        total, count = means(ctx)["preference/loss"]
        assert total / count == pytest.approx(slow(lp.tolist()))
    ctx = context()
    orpo(ctx, lp)
    total, count = means(ctx)["preference/loss"]
    odds_alone = (slow_orpo(lp.tolist()) - slow_orpo(lp.tolist(), 0.0)) / 0.5
    assert total / count == pytest.approx(odds_alone)


def test_a_longer_response_does_not_lose_for_its_length_by_hand() -> None:
    loss_mask = Ragged.of([[True] * 4, [True]], torch.bool)
    lp = loss_mask.like(torch.tensor([-0.5] * 4 + [-1.0]))
    ctx = context()
    chosen = torch.tensor([True, False])
    out = simpo_weights(ctx, lp, loss_mask, chosen, torch.tensor([3, 3]), beta=2.0, margin=0.25)
    weight = 2 * 2.0 * sigmoid(-0.75)  # m = 2 (-0.5 + 1) - 0.25
    assert out.preference.tolist() == [pytest.approx([weight / 4] * 4), [pytest.approx(-weight)]]
    assert out.preferred.tolist() == [1.0, 1.0]


def test_a_response_that_is_certain_is_survived() -> None:
    loss_mask = Ragged.of([[True], [True]], torch.bool)
    for numbers in ([0.0, -1.0], [-1.0, 0.0], [0.0, 0.0], [-1e4, 0.0]):
        lp = loss_mask.like(torch.tensor(numbers))
        out = orpo_weights(context(), lp, loss_mask, torch.tensor([True, False]), torch.tensor([0, 0]))
        assert out.preference.values.isfinite().all()


def test_a_policy_that_has_not_drifted_has_no_kl_below_0() -> None:
    less = KL.like(KL.values - 5 * mask().values)
    ctx, lp = context(), logprobs(0)
    weights = kto(ctx, lp, less)
    assert means(ctx)["preference/kl"][0] == 0.0
    torch.testing.assert_close(
        gradient(weights, lp), differences(lambda now: slow_kto(now, less), lp), atol=1e-6, rtol=1e-5
    )


def test_mismatched_rows_have_the_response_of_the_next_other_prompt() -> None:
    tokens = Ragged.of([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    loss_mask = Ragged.of([[False, True, True], [False, True], [False, False, True, False]], torch.bool)
    out = mismatched(tokens, loss_mask)
    assert out.kl_tokens.tolist() == [[1, 5], [4, 8], [6, 7, 9, 2, 3]]
    assert out.kl_mask.tolist() == [[False, True], [False, True], [False, False, False, True, True]]
    same = Ragged.of([[1, 2], [1, 3], [4, 5], [6, 7], [6, 8], [1, 9]])
    behind = Ragged.of([[False, True]] * 6, torch.bool)
    others = [[1, 5], [1, 5], [4, 7], [6, 9], [6, 9], [1, 5]]  # never a response to the same prompt
    assert mismatched(same, behind).kl_tokens.tolist() == others
    alone = Ragged.of([[1, 2], [1, 3], [1, 4]])
    assert mismatched(alone, Ragged.of([[False, True]] * 3, torch.bool)).kl_tokens.tolist() == [
        [1, 3],
        [1, 4],
        [1, 2],
    ]
    nothing = mismatched(Ragged.of([], torch.int64), Ragged.of([], torch.bool))
    assert nothing.kl_tokens.tolist() == nothing.kl_mask.tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_rewards_are_the_gradient_of_the_pairs_loss(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, generator=draw, dtype=torch.float64)

    def slow(r: list[float]) -> float:
        return sum(-math.log(sigmoid(r[won] - r[lost])) for won, lost in PAIRS) / len(PAIRS)

    ctx = context()
    weights, preferred = reward_weights(ctx, rewards, *pairs())
    steps = torch.eye(6, dtype=torch.float64) * 1e-6
    expected = [(slow((rewards + s).tolist()) - slow((rewards - s).tolist())) / 2e-6 for s in steps]
    assert (-weights.double() / 6).tolist() == pytest.approx(expected, abs=1e-6)
    in_order = {row: float(rewards[won] > rewards[lost]) for won, lost in PAIRS for row in (won, lost)}
    assert preferred.tolist() == [in_order[row] for row in range(6)]
    total, count = means(ctx)["preference/loss"]
    assert total / count == pytest.approx(slow(rewards.tolist()))


@pytest.mark.parametrize("graph", ["dpo", "simpo", "orpo", "kto"])
def test_another_aggregation_is_refused_and_the_edit_that_is_named_mends_it(graph: str) -> None:
    source = "examples" if graph == "kto" else "pairs"
    files = f"{source}.files=[rows.jsonl]"
    wrong = ["update_policy.aggregate=seq-mean-token-sum-norm", "update_policy.norm=64"]
    with pytest.raises(GraphError) as caught:
        compile_graph(graph, [files, *wrong], 1)
    (problem,) = caught.value.problems
    assert problem.kind == "sequence-sum"
    assert problem.remedy == "set: {update_policy.aggregate: seq-mean-token-sum, update_policy.norm: null}"
    mended = ["update_policy.aggregate=seq-mean-token-sum", "update_policy.norm=null"]
    compile_graph(graph, [files, *wrong, *mended], 1)


def test_a_tie_is_half_in_order() -> None:
    rewards, chosen = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([True, False, True, False])
    assert reward_weights(context(), rewards, chosen, torch.tensor([0, 0, 1, 1])).preferred.tolist() == [
        0.5,
        0.5,
        0.0,
        0.0,
    ]
