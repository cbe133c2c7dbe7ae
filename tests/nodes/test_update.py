"""The objectives that update ops hand to a train engine."""

import math
from statistics import pvariance

import pytest
import torch

from rlgraph.nodes.loss.policy import decoupled_ppo_approx, ppo_clip, reinforce, sft
from rlgraph.nodes.loss.sequence import gspo
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import critic_objective, policy_objective
from rlgraph.ops import Loss, Totals
from rlgraph.runtime.engines.metric_sums import MetricSums

MASK = Ragged.of([[False, True, True], [False, True]], torch.bool)
TOTALS = Totals(tokens=3, sequences=2)


def column(*values: float) -> Ragged:
    return MASK.like(torch.tensor(values, dtype=torch.float64))


def batch(**columns: Ragged) -> dict[str, Ragged]:
    return {"loss_mask": MASK, "logprobs": column(0, -1, -2, 0, -3), **columns}


def test_policy_objective_of_sft() -> None:
    loss, metrics = policy_objective(Loss(sft, {}, {}), "token-mean", 0.0, "k3", 0.0)(batch(), TOTALS)
    assert loss.item() == pytest.approx(2.0)
    assert metrics == {}


def test_policy_objective_adds_kl_and_subtracts_entropy() -> None:
    columns = batch(advantages=column(0, 1, 1, 0, -1), ref_logprobs=column(0, -2, -2, 0, -1))
    columns["entropy"] = column(9, 1, 2, 9, 6)
    objective = policy_objective(Loss(reinforce, {}, {}), "token-sum", 0.5, "k1", 0.1)
    loss, metrics = objective(columns, TOTALS)
    # -A lp: 1 + 2 - 3 = 0; kl: 1 + 0 - 2 = -1; entropy: 9
    assert loss.item() == pytest.approx(0 + 0.5 * -1 - 0.1 * 9)
    assert {name: metric.value for name, metric in metrics.items()} == {
        "entropy": 3.0,
        "kl_ref": pytest.approx(-1 / 3),
        "no_advantage": 0.0,
        "advantage": pytest.approx(1 / 3),
        "advantage_std": pytest.approx(math.sqrt(8) / 3),
        "advantage_min": -1.0,
        "advantage_max": 1.0,
    }


def test_policy_objective_measures_ratios() -> None:
    columns = batch(old_logprobs=column(0, -1, -2.5, 0, -1), advantages=column(0, 1, 1, 0, 1))
    loss = Loss(ppo_clip, {"clip": 0.2, "clip_high": None, "dual_clip": None}, {})
    total, metrics = policy_objective(loss, "token-mean", 0.0, "k3", 0.0)(columns, TOTALS)
    ratios = [1.0, math.exp(0.5), math.exp(-2)]
    assert total.item() == pytest.approx(-(1.0 + 1.2 + ratios[2]) / 3)
    assert metrics["clip_fraction"].value == 2 / 3
    assert [metrics[f"ratio{end}"].value for end in ("_min", "_max")] == pytest.approx([ratios[2], ratios[1]])
    assert metrics["ratio"].value == pytest.approx(sum(ratios) / 3)
    assert metrics["kl_old"].value == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)


def test_policy_objective_measures_the_ratios_of_sequences_where_those_are_clipped() -> None:
    columns = batch(old_logprobs=column(0, -1.5, -1.5, 0, -3.1), advantages=column(0, 1, 1, 0, 1))
    loss = Loss(gspo, {"clip": 0.05, "clip_high": 0.05}, {})
    _, metrics = policy_objective(loss, "seq-mean-token-mean", 0.0, "k3", 0.0)(columns, TOTALS)
    # the first sequence's changes, 0.5 and -0.5, cancel; the second's ratio is exp(0.1)
    assert metrics["clip_fraction"].value == 1 / 3


def test_policy_objective_measures_ratios_to_the_policy_that_an_approximation_clips_around() -> None:
    columns = batch(old_logprobs=column(0, -1, -2.5, 0, -1), advantages=column(0, 1, 1, 0, 1))
    loss = Loss(decoupled_ppo_approx, {"staleness": 1.0, "clip": 0.4, "clip_high": None, "cap": None}, {})
    _, metrics = policy_objective(loss, "token-mean", 0.0, "k3", 0.0)(columns, TOTALS)
    ratios = [1.0, math.exp(0.25), math.exp(-1)]  # half as far as from the policy that sampled
    assert metrics["clip_fraction"].value == 1 / 3
    assert metrics["ratio"].value == pytest.approx(sum(ratios) / 3)


def test_policy_objective_divides_by_a_constant_norm() -> None:
    objective = policy_objective(Loss(sft, {}, {}), "seq-mean-token-sum-norm", 0.0, "k3", 0.0, 4.0)
    assert objective(batch(), TOTALS)[0].item() == pytest.approx((1 + 2 + 3) / 2 / 4)


def test_policy_objective_reaches_only_masked_tokens() -> None:
    logprobs = torch.tensor([0.0, -1, -2, 0, -3], requires_grad=True)
    columns = batch(old_logprobs=column(0, -1, -2, 0, -3), advantages=column(5, 1, -1, 5, 2))
    columns["logprobs"] = MASK.like(logprobs)
    loss, _ = policy_objective(Loss(ppo_clip, {"clip": 0.2}, {}), "token-mean", 0.0, "k3", 0.0)(
        columns, TOTALS
    )
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, -1 / 3, 1 / 3, 0, -2 / 3])


def test_critic_objective_by_hand() -> None:
    columns = {
        "loss_mask": MASK,
        "new_values": column(9, 1.0, 0.5, 9, 0.0),
        "values": column(9, 0.0, 0.5, 9, 0.0),
        "returns": column(9, 1.0, 1.0, 9, -0.1),
    }
    # free: 0, 0.25, 0.01; clamped to 0.2 around the old: (0.2 - 1)^2 = 0.64, 0.25, 0.01
    loss, metrics = critic_objective(0.2, "token-mean")(columns, TOTALS)
    assert loss.item() == pytest.approx((0.64 + 0.25 + 0.01) / 2 / 3)
    explained = metrics.pop("explained_variance").value
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx(
        {
            "value": 0.5,
            "value_std": math.sqrt(pvariance([1.0, 0.5, 0.0])),
            "value_min": 0.0,
            "value_max": 1,
            "return": 1.9 / 3,
            "return_std": math.sqrt(pvariance([1.0, 1.0, -0.1])),
            "return_min": -0.1,
            "return_max": 1.0,
            "clip_fraction": 1 / 3,
        }
    )
    returns, errors = [1.0, 1.0, -0.1], [1.0, 0.5, -0.1]
    assert explained == pytest.approx(1 - pvariance(errors) / pvariance(returns))


def test_critic_objective_gradient_by_finite_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    fixed = {
        name: MASK.like(torch.randn(5, generator=draw, dtype=torch.float64)) for name in ("values", "returns")
    }

    def total(flat: torch.Tensor) -> torch.Tensor:
        columns = {"loss_mask": MASK, "new_values": MASK.like(flat), **fixed}
        return critic_objective(0.2, "seq-mean-token-mean")(columns, TOTALS)[0]

    start = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(total, start)


def test_policy_objective_weighs_the_loss_of_tokens_and_not_the_kl() -> None:
    columns = batch(advantages=column(9, 1, 1, 9, -1), ref_logprobs=column(0, -2, -2, 0, -1))
    columns["rollout_weights"] = column(9, 2, 0, 9, 0.5)
    objective = policy_objective(Loss(reinforce, {}, {}), "token-mean", 0.5, "k1", 0.0)
    # -w A lp: 2 + 0 - 1.5, still over all three tokens; kl: 1 + 0 - 2
    assert objective(columns, TOTALS)[0].item() == pytest.approx((0.5 + 0.5 * -1) / 3)


def test_policy_objective_measures_how_far_the_engines_are_apart() -> None:
    columns = batch(advantages=column(0, 1, 1, 0, 1), old_logprobs=column(0, -1, -2, 0, -1))
    columns["rollout_logprobs"] = column(9, -1, math.log(0.5), 9, -1)
    loss = Loss(ppo_clip, {"clip": 0.2}, {})
    _, metrics = policy_objective(loss, "token-mean", 0.0, "k3", 0.0)(columns, TOTALS)
    gap, d = 0.5 - math.exp(-2), math.log(0.5) + 2
    assert metrics["rollout_gap"].value == pytest.approx(gap / 3)
    assert metrics["rollout_gap_max"].value == pytest.approx(gap)
    assert metrics["rollout_gap_std"].value == pytest.approx(gap * math.sqrt(2) / 3)
    assert metrics["rollout_kl"].value == pytest.approx((math.exp(-d) + d - 1) / 3)
    # without old_logprobs, against those of now
    del columns["old_logprobs"]
    _, metrics = policy_objective(Loss(reinforce, {}, {}), "token-mean", 0.0, "k3", 0.0)(columns, TOTALS)
    assert metrics["rollout_gap_max"].value == pytest.approx(max(gap, math.exp(-1) - math.exp(-3)))


def test_policy_objective_measures_nothing_where_nothing_was_written() -> None:
    nothing = MASK.like(torch.zeros(5, dtype=torch.bool))
    columns = batch(loss_mask=nothing, rollout_logprobs=column(0, 0, 0, 0, 0))
    _, metrics = policy_objective(Loss(sft, {}, {}), "token-mean", 0.0, "k3", 0.0)(columns, Totals(0, 2))
    sums = MetricSums()
    sums.add_metrics(metrics)
    assert all(math.isnan(metric.value) for metric in sums.metrics.values()), "no mean of nothing"
