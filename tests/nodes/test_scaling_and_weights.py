"""Scales of rewards, weights and masks of tokens, the unbiased KL and a bound on a row, by their formulas."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from recorded import means
from rlgraph.errors import RunError
from rlgraph.nodes.loss.policy import ppo_clip
from rlgraph.nodes.reward.scaling import cut_off, scale, whiten
from rlgraph.nodes.rollout.sampling import ResponseLimits
from rlgraph.nodes.select.correction import reject, tis
from rlgraph.nodes.select.weight import entropy, second_moment
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context, Loss, Totals

GROUPS = [[1.0, 0.0, 0.25, 0.0], [0.5, 2.0], [0.75]]
REWARDS = torch.tensor([reward for group in GROUPS for reward in group])
GROUP = torch.tensor([number for number, group in enumerate(GROUPS) for _ in group])


def context(rows: int = 0) -> Context:
    return Context("node", 0, 0, rows=range(rows), total_rows=rows)


def slow_scale(own: float, others: list[float]) -> float:
    """A reward less the mean of others, over their standard deviation where they have one."""
    centred = own - statistics.fmean(others) if others else own
    deviation = statistics.stdev(others) if len(others) > 1 else 0.0
    return centred / (deviation + 1e-6) if deviation > 1e-6 else centred


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_whitened_over_a_group_by_its_formula(leave_one_out: bool) -> None:
    expected = []
    for group in GROUPS:
        for place, own in enumerate(group):
            others = group[:place] + group[place + 1 :] if leave_one_out else group
            alone = len(group) == 1
            expected.append(own if alone else slow_scale(own, others))
    found = whiten(REWARDS, GROUP, mean="group", std="group", leave_one_out=leave_one_out)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_whitened_over_the_batch_by_its_formula() -> None:
    rewards = REWARDS.tolist()
    expected = [slow_scale(own, rewards) for own in rewards]
    assert whiten(REWARDS, GROUP).tolist() == pytest.approx(expected, rel=1e-5)
    assert whiten(REWARDS, GROUP, mean="none", std="none").tolist() == rewards
    assert whiten(torch.full((3,), 0.5), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_scaled_and_cut_by_hand() -> None:
    found = scale(context(), torch.tensor([-1.0, 0.0, 1.0]), shift=0.5, factor=4.0, low=-1.0, high=5.0)
    assert found.tolist() == [-1.0, 2.0, 5.0]
    truncated = torch.tensor([False, True, False])
    assert cut_off(context(), torch.tensor([1.0, 1.0, 0.5]), truncated, reward=-0.5).tolist() == [
        1,
        -0.5,
        0.5,
    ]


def test_the_highest_entropies_of_each_mini_batch_count() -> None:
    mask = Ragged.of([[False, True, True], [True] * 3, [True] * 4, [True]], torch.bool)
    entropies = mask.like(torch.tensor([9, 1, 2, 3, 4, 5, 0.1, 0.4, 0.2, 0.3, 0.5]))
    ctx = context(4)
    found = entropy(ctx, entropies, mask, None, share=0.4, minibatches=2)
    for rows in ([0, 1], [2, 3]):
        part = torch.cat([entropies[row][mask[row]] for row in rows])
        kept = torch.cat([found[row][mask[row]] for row in rows])
        assert kept.bool().tolist() == (part >= part.quantile(0.6)).tolist()
    assert found[0][0] == 0, "outside the loss mask"
    assert means(ctx)["node/share"] == (4.0, 10)
    doubled = entropy(
        context(4), entropies, mask, mask.like(torch.full((11,), 2.0)), share=0.4, minibatches=2
    )
    assert doubled.values.equal(found.values * 2)


def test_the_farthest_tokens_go_until_the_rest_is_near() -> None:
    mask = Ragged.of([[True] * 4, [True, False]], torch.bool)
    old = mask.like(torch.tensor([0.1, -0.2, 0.5, 0.0, -1.0, 7.0]))
    nothing = mask.like(torch.zeros(6))
    # squares 0, 0.01, 0.04, 0.25, 1: their means are 0, 0.005, 0.0167, 0.075, 0.26
    found = second_moment(context(2), old, nothing, mask, None, limit=0.05)
    assert found.values.tolist() == [1, 1, 0, 1, 0, 0]
    far = second_moment(context(2), old, mask.like(torch.full((6,), 9.0)), mask, None, limit=0.05)
    assert far.values.sum() == 1, "one is left"


def test_sequences_are_left_out_by_the_geometric_mean_and_weighed_by_token() -> None:
    mask = Ragged.of([[True, True], [True, True], [True]], torch.bool)
    old = mask.like(torch.tensor([0.5, -0.5, 0.9, 0.5, -0.8]))
    nothing = mask.like(torch.zeros(5))
    by_token = tis(context(), old, nothing, mask, cap=None)
    found = reject(
        context(), old, nothing, mask, by_token, kl="k1", threshold=-math.log(0.5), least=-math.log(1.5)
    )
    # the geometric means are 1, exp(0.7) = 2.01 and exp(-0.8) = 0.45
    assert found.values.tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5), 0, 0, 0])


def test_the_gradient_of_an_unbiased_kl_on_policy_is_that_of_the_kl() -> None:
    mask = Ragged.of([[True, True, True]], torch.bool)
    logprobs = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ref = mask.like(torch.tensor([-0.7, -1.0, -2.5], dtype=torch.float64))
    loss = Loss(ppo_clip, {"clip": 0.2}, {})
    objective = policy_objective(loss, "token-sum", 1.0, "k3", 0.0, None, kl_unbiased=True)
    batch = {"loss_mask": mask, "logprobs": mask.like(logprobs), "ref_logprobs": ref}
    total, _ = objective({**batch, "advantages": mask.like(torch.zeros(3))}, Totals(3, 1))
    (gradient,) = torch.autograd.grad(total, logprobs)
    # of KL = E[log p / ref], by the score function: (log p - log ref) d log p
    torch.testing.assert_close(gradient, (logprobs - ref.values).detach())


def test_a_prompt_takes_its_part_of_the_bound_on_a_row() -> None:
    prompts = [[1] * 3, [1] * 8]
    assert ResponseLimits(max_new_tokens=5, max_total_tokens=None).of_prompts(context(2), prompts) == [5, 5]
    assert ResponseLimits(max_new_tokens=5, max_total_tokens=10).of_prompts(context(2), prompts) == [5, 2]
    with pytest.raises(RunError, match=r"(?s)prompt 1 of the batch has 8 tokens.*max_prompt_tokens: 7"):
        ResponseLimits(max_new_tokens=5, max_total_tokens=8).of_prompts(context(2), prompts)
