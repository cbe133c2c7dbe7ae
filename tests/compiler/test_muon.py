"""What Muon and a float32 head cost in a plan, beside AdamW and a head like the body."""

from __future__ import annotations

from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.efficiency import BEST, WORST
from rlgraph.costs.memory import EngineComponent
from rlgraph.costs.model_size import size_of
from rlgraph.costs.muon import exchanged, experts_on_device, matrices_on_device
from rlgraph.costs.pricing import Pricing, sizes_of
from rlgraph.costs.workload import workload
from rlgraph.printing.plan_text import plan_text

SEVEN, MIXTURE = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"
MUON, WIDE = "models.policy.optimizer.kind=muon", "models.policy.train.head_dtype=float32"


def priced(*overrides: str, model: str = SEVEN, devices: int = 8) -> tuple[Pricing, Any]:
    """The prices of GRPO on H100s, and its update."""
    paths = [f"models.{name}.path={model}" for name in ("policy", "ref")]
    types = [f"models.{name}.train.dtype=bfloat16" for name in ("policy", "ref")]
    plan = compile_graph("grpo", [*paths, *types, *overrides], devices)
    pricing = Pricing(plan, load_cluster("h100-8"), workload(plan), sizes_of(plan))
    (step,) = [step for step in plan.steps if step.updated]
    return pricing, step


@pytest.mark.parametrize("model", [SEVEN, MIXTURE])
def test_muon_keeps_one_average_of_a_matrix(model: str) -> None:
    item, size = EngineComponent("policy", "train", "optimizer"), size_of(model)
    kept = [priced(*more, model=model)[0].items("main")[item] for more in ([], [MUON])]
    matrices = sum(rows * columns for rows, columns in exchanged(size))
    matrices += sum(rows * columns * count for (rows, columns), count in experts_on_device(size, 1))
    assert matrices == matrices_on_device(size, 1) > 0.75 * size.parameters
    assert kept[0] - kept[1] == pytest.approx(4 * matrices / 8, rel=1e-3)


@pytest.mark.parametrize("model", [SEVEN, MIXTURE])
def test_muon_takes_longer_and_moves_more(model: str) -> None:
    (adamw, update), (muon, own) = priced(model=model), priced(MUON, model=model)
    for grade in BEST, WORST:
        (before, least), (after, most) = adamw.seconds(update, grade), muon.seconds(own, grade)
        assert before < after < 2 * before
        # weights are gathered in every pass; a matrix goes to one device and back
        assert least < most < 1.2 * least


def test_alone_muon_moves_nothing() -> None:
    pricing, update = priced(MUON, devices=1)
    assert pricing.seconds(update, BEST)[1] == 0


def test_a_float32_head_takes_longer_and_more_memory() -> None:
    (narrow, update), (wide, own) = priced(), priced(WIDE)
    assert narrow.seconds(update, BEST)[0] < wide.seconds(own, BEST)[0]
    copy = 4 * size_of(SEVEN).embedding
    for moment, parts in narrow.passing(update).items():
        more = wide.passing(own)[moment].total() - parts.total()
        assert (more > 0.9 * copy) == (moment in ("scores", "logits", "head")), moment
    full = "models.policy.train.dtype=float32"  # where the head is so anyway
    assert priced(full)[0].passing(update) == priced(full, WIDE)[0].passing(update)


def test_a_plan_says_both() -> None:
    text = plan_text(priced(MUON, WIDE)[0].plan)
    assert "model policy: trained by muon, head lm, held by fsdp (bfloat16, head float32" in text


def test_a_reference_whose_head_computes_otherwise_shares_weights_too() -> None:
    adapted = "models.policy.train.lora={rank: 8}"
    for more in ([], [WIDE]):
        assert priced(adapted, *more)[0].plan.models["ref"].shares == "policy"
