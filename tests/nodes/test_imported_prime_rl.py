"""The update of a graph that `rlgraph import prime-rl` writes has the gradient of prime-rl's formula.

Per trained token, with A the advantage, p now and q of what sampled (prime-rl at 559b447, August 2026):
-[trusted] adv_tau A p / q + kl_tau log(p / q)^2, summed over the batch and divided by its trained
tokens; trusted is p - q <= dppo_mask_high where A > 0, else p - q >= -dppo_mask_low.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlgraph.frontend.compose import compose
from rlgraph.importing.prime_rl import import_prime_rl
from rlgraph.nodes import LOSSES
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Loss, Totals
from rlgraph.ops.registry import load

# log-probs now and of what sampled, and advantages: tokens within and beyond both limits, with either sign
NOW = [[-0.1, -2.0, -0.7, -3.0], [-1.2, -0.05, -6.0]]
SAMPLED = [[-0.6, -0.4, -0.71, -3.3], [-0.3, -1.6, -1.0]]
ADVANTAGES = [[0.75] * 4, [-0.25] * 3]


def ragged(rows: list[list[float]]) -> Ragged:
    return Ragged.of([[0.0, *row] for row in rows], torch.float64)


def restated(low: float, high: float, kl_tau: float) -> list[float]:
    now = torch.tensor([x for row in NOW for x in row], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([x for row in SAMPLED for x in row], dtype=torch.float64)
    advantages = torch.tensor([x for row in ADVANTAGES for x in row], dtype=torch.float64)
    moved = now.exp() - sampled.exp()
    trusted = torch.where(advantages > 0, moved <= high, moved >= -low).detach()
    loss = (
        -trusted.double() * advantages * (now - sampled).exp() + kl_tau * (now - sampled) ** 2
    ).sum() / len(now)
    (gradient,) = torch.autograd.grad(loss, now)
    return gradient.tolist()


@pytest.mark.parametrize(("low", "high", "kl_tau"), [(0.2, 0.2, 1e-3), (0.5, 0.3, 0.1), (0.2, 0.2, 0.0)])
def test_the_imported_loss_is_prime_rls(low: float, high: float, kl_tau: float, tmp_path: Path) -> None:
    words = ("--orchestrator.group-size", "4", "--max-steps", "3", "--trainer.loss.dppo-mask-low", str(low))
    more = ("--trainer.loss.dppo-mask-high", str(high), "--trainer.loss.kl-tau", str(kl_tau))
    (tmp_path / "out.yaml").write_text(import_prime_rl((*words, *more)).graph())
    update = dict(compose(str(tmp_path / "out.yaml")).plain()["nodes"]["update_policy"])
    attributes = dict(update["loss"])
    op = load(LOSSES[attributes["kind"]], attributes.pop("kind"), Loss)
    loss = Loss(op.body, op.attributes(**attributes).model_dump(), {})
    columns = {"advantages": ragged(ADVANTAGES), "rollout_logprobs": ragged(SAMPLED)}
    for name, source in update["in"].items():
        columns[name] = columns[source]
    del columns["rollout_logprobs"]
    mask = columns["advantages"].like(torch.tensor([False] + [True] * 4 + [False] + [True] * 3))
    aggregate = update.get("aggregate", "token-mean")
    objective = policy_objective(
        loss, aggregate, update.get("kl_coef", 0.0), update.get("kl", "k3"), 0.0, None
    )
    logprobs = ragged(NOW).values.clone().requires_grad_()
    value, _ = objective({**columns, "loss_mask": mask, "logprobs": mask.like(logprobs)}, Totals(7, 2))
    (gradient,) = torch.autograd.grad(value, logprobs)
    right = restated(low, high, kl_tau)
    assert gradient[mask.values].tolist() == pytest.approx(right, rel=1e-9, abs=1e-12)
