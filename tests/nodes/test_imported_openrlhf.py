"""Imported graphs of OpenRLHF compute what its formulas say: advantages and corrections, in float64 by hand.

The formulas are those of OpenRLHF at 3c3be62 (2026-08-13): compute_advantages_and_returns, compute_reward and
PolicyLoss. Its package can't be installed without a GPU's tools, so they are written out here.
"""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.frontend.compose import compose
from rlgraph.importing.openrlhf import import_openrlhf
from rlgraph.nodes.advantage.gae import reinforce_pp
from rlgraph.nodes.reward.scaling import whiten
from rlgraph.nodes.reward.shaping import kl_penalty
from rlgraph.nodes.select.correction import mis, reject, tis
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context

LENGTHS = [3, 1, 4, 2]  # of four samples of two prompts
GROUP = torch.tensor([0, 0, 1, 1])
REWARDS = [1.0, 0.25, 0.5, 0.75]
DRAWN = random.Random(0)
OLD, REF, SAMPLED = (
    [[DRAWN.uniform(-2.0, 0.0) for _ in range(length)] for length in LENGTHS] for _ in range(3)
)
MASK = Ragged.of([[True] * length for length in LENGTHS], torch.bool)
BETA = 0.05


def nodes(tmp_path: Path, *flags: str) -> dict[str, Any]:
    (tmp_path / "out.yaml").write_text(import_openrlhf(flags).graph())
    composed: dict[str, Any] = compose(str(tmp_path / "out.yaml")).plain()["nodes"]
    return composed


def attributes(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in ("op", "in", "rows")}


def column(values: list[list[float]]) -> Ragged:
    return Ragged.of(values, torch.float32)


def normalised(estimator: str) -> list[float]:
    """Rewards of a prompt's two samples, compared."""
    out = []
    for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        mean = statistics.fmean([REWARDS[one], REWARDS[other]])
        deviation = statistics.stdev([REWARDS[one], REWARDS[other]])
        out.append(
            {
                "rloo": REWARDS[one] - REWARDS[other],
                "dr_grpo": REWARDS[one] - mean,
                "group_norm": (REWARDS[one] - mean) / (deviation + 1e-9),
            }[estimator]
        )
    return out


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "group_norm"])
def test_a_kl_is_taken_off_behind_the_comparison(estimator: str, tmp_path: Path) -> None:
    flags = ("--algo.advantage.estimator", estimator, "--rollout.n_samples_per_prompt", "2")
    graph = nodes(tmp_path, *flags, "--algo.kl.init_coef", str(BETA))
    normal = whiten(torch.tensor(REWARDS), GROUP, **attributes(graph["normal"]))
    context = Context("shaped", 0, 0, rows=range(4), total_rows=4)
    shaped = kl_penalty(context, normal, column(OLD), column(REF), MASK, **attributes(graph["shaped"]))
    found = reinforce_pp(shaped, MASK, **attributes(graph["advantages"]))
    right = []
    for old, ref, reward in zip(OLD, REF, normalised(estimator), strict=True):
        steps = [-BETA * (p - q) for p, q in zip(old, ref, strict=True)]
        steps[-1] += reward
        right += [sum(steps[place:]) for place in range(len(steps))]
    assert found.values.tolist() == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_corrections_weigh_tokens_as_its_loss_does(kind: str, tmp_path: Path) -> None:
    flags = ("--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type", kind)
    graph = nodes(tmp_path, *flags, "--algo.advantage.is_correction_threshold", "0.6", "1.5")
    context = Context("rollout_weights", 0, 0, rows=range(4), total_rows=4)
    given = (column(OLD), column(SAMPLED), MASK)
    rule = attributes(graph["rollout_weights"])
    if kind == "tis":
        found = tis(context, *given, **rule)
    elif kind == "icepop":
        found = mis(context, *given, **rule)
    else:
        weights = tis(context, *given, **attributes(graph["weights"]))
        found = reject(context, *given, weights, **rule)
    right = []
    for old, sampled in zip(OLD, SAMPLED, strict=True):
        ratios = [math.exp(p - q) for p, q in zip(old, sampled, strict=True)]
        geometric = math.exp(statistics.fmean(p - q for p, q in zip(old, sampled, strict=True)))
        for ratio in ratios:
            right.append(
                {
                    "tis": min(max(ratio, 0.6), 1.5),
                    "icepop": ratio if 0.6 <= ratio <= 1.5 else 0.0,
                    "seq-mask-tis": ratio if 0.6 <= geometric <= 1.5 else 0.0,
                }[kind]
            )
    assert 0.0 in right or kind == "tis"
    assert found.values.tolist() == pytest.approx(right, abs=1e-5)
