"""What balances the experts of a mixture is in the plan of a model that has it, and in no other."""

from __future__ import annotations

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_text import plan_text

DEEPSEEK, QWEN = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B"
LOSS, RATE = "models.policy.train.router_aux_loss_coef", "models.policy.train.router_bias_update_rate"


def planned(path: str, *settings: str) -> Plan:
    return compile_graph("grpo", [f"models.policy.path={path}", "prompts.files=[x.jsonl]", *settings], 8)


def held(plan: Plan, model: str) -> str:
    return next(line for line in plan_text(plan).splitlines() if line.startswith(f"  model {model}:"))


def test_a_plan_says_what_balances_experts() -> None:
    both = planned(DEEPSEEK, f"{LOSS}=1e-4", f"{RATE}=1e-3")
    said = "auxiliary loss of routers times 0.0001, bias of routers moved by 0.001 per step"
    assert f"fsdp (float32, {said})" in held(both, "policy")
    assert "routers" not in held(both, "ref") and "routers" not in plan_text(planned(DEEPSEEK))


@pytest.mark.parametrize("setting", [f"{LOSS}=1e-3", f"{RATE}=1e-3"])
def test_it_decides_numbers_of_a_run(setting: str) -> None:
    assert planned(DEEPSEEK, setting).digest != planned(DEEPSEEK).digest
    assert planned(DEEPSEEK, setting).steps == planned(DEEPSEEK).steps


def test_adapters_take_the_loss_alone() -> None:
    assert "auxiliary loss" in held(
        planned(QWEN, "models.policy.train.lora={rank: 8}", f"{LOSS}=1e-3"), "policy"
    )
