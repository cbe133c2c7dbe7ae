"""``show --column`` says of a column what the plan does with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.printing.column_text import lineage_text


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize(("column", "devices"), [("tokens", 1), ("tokens", 4), ("answer", 2), ("rewards", 2)])
def test_a_column(golden: Callable[[str, str], None], column: str, devices: int) -> None:
    result = call("show", "demo", "--column", column, "--devices", str(devices))
    assert result.exit_code == 0 and not result.stderr
    golden(f"column/demo-{column}-{devices}.txt", result.stdout)


@pytest.mark.parametrize("name", shipped_graphs())
def test_every_column_of_every_plan(name: str) -> None:
    """Written once a phase; every reader of the plan is there; freed as the plan frees it."""
    plan = compile_graph(name, devices=2)
    for phase, steps in (("train", plan.steps), ("eval", plan.eval_steps)):
        for column in plan.columns.get(phase, {}):
            lines = block(lineage_text(plan, column), phase)
            assert sum(line.startswith("written ") for line in lines) == 1
            for step in steps:
                if column in step.reads and not step.inserted:
                    assert any(line.startswith(f"read     step {step.id}, {step.node} ") for line in lines)
                if column in step.frees:
                    assert {f"freed    step {step.id}", f"freed    step {step.id}, {column}"} & {*lines}


def block(text: str, phase: str) -> list[str]:
    head = "in every iteration" if phase == "train" else "in evaluation"
    (found,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return [line.strip() for line in found.splitlines()]


def test_a_copy_by_its_own_name() -> None:
    text = call("show", "demo", "--column", "tokens@balanced/2", "--devices", "2").stdout
    assert "written  step 8, repartition tokens, loss_mask onto main[0-1]" in text
    assert "read     step 9, old_logprobs (logprobs)\n" in text


def test_a_column_under_another_parameter() -> None:
    text = call("show", "ppo", "--column", "shaped", "--devices", "1").stdout
    assert "advantages (advantage.gae), as its rewards\n" in text


def test_a_filtered_column(tmp_path: Path) -> None:
    path = tmp_path / "filtered.yaml"
    edits = "[{add: {mixed: {op: filter.mixed}}}, {set: {update_policy.rows: mixed}}]"
    path.write_text(f"graph: filtered\nextends: grpo\nedits: {edits}\n")
    plan = compile_graph(str(path), devices=1)
    assert "update_policy (update.policy), from tokens/mixed\n" in lineage_text(plan, "tokens")
    assert "domain   samples/mixed, those of samples that `mixed` keeps\n" in lineage_text(
        plan, "tokens/mixed"
    )


def test_an_override_counts() -> None:
    text = call("show", "demo", "rollout.n=3", "--column", "rewards").stdout
    assert "samples, 3 rows for each of prompts" in text


def test_what_is_not_there() -> None:
    result = call("show", "demo", "--column", "tokns")
    assert result.exit_code == 1 and "did you mean `tokens`?" in result.stderr
    pruned = call("show", "grpo", "update_policy.kl_coef=0", "--column", "ref_logprobs")
    assert pruned.exit_code == 1 and "pruned `ref_logprobs`: it leads to no update" in pruned.stderr
    assert call("show", "demo", "--column", "tokens", "--origin").exit_code == 2
