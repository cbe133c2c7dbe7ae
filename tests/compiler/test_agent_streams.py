"""Graphs whose conversations stream: the agent rollout leaves what goes on, there and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_text import plan_text

POOLS = ["pools={train: {devices: 1}, gen: {devices: 1}}", "update_policy.in.old_logprobs=rollout_logprobs"]
STREAM = "schedule.buffer={staleness: 1, chunk: 32}"


def plan(*settings: str) -> Plan:
    return compile_graph("calculator_tool", [*POOLS, *settings])


def leaves(made: Plan) -> dict[str, int]:
    return {step.node: step.unfinished for step in (*made.steps, *made.eval_steps) if step.unfinished}


def attributes(made: Plan, phase: str = "train") -> Any:
    return made.functions[phase]["rollout"].attributes


def test_an_agent_streams(golden: Callable[[str, str], None]) -> None:
    made = plan(STREAM)
    golden("plan/agent-streams.txt", plan_text(made))
    assert leaves(made) == {"rollout": 1} and attributes(made)["chunk"] == 32
    assert attributes(made, "eval")["chunk"] is None, "an evaluation draws its rows as a whole"


def test_a_chunk_of_ones_own_stays() -> None:
    assert attributes(plan(STREAM, "rollout.chunk=16"))["chunk"] == 16


def test_elsewhere_it_leaves_nothing_but_by_a_chunk() -> None:
    assert leaves(plan()) == {}
    assert leaves(plan("rollout.chunk=16")) == {"rollout": 1}
