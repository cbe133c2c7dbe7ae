"""Rows of two origins in one update: its gradient is that of all of them, however they are cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.nodes.support.record_file import about, read, steps_of
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
GRAPH = f"""
graph: union
extends: {HERE / "ones.yaml"}
edits:
  - remove: [eval, ref_logprobs, models.ref, update_policy.kl_coef]
  - set:
      schedule: {{iterations: 1, record_every: 1}}
      old_logprobs.rows: [rollout, examples]
      old_logprobs.keep: true
      update_policy.rows: [rollout, examples]
      update_policy.minibatches: 1
      update_policy.aggregate: token-mean
  - add:
      examples:
        op: data.examples
        files: ["${{env:RLGRAPH_TEST_FILES}}/train.parquet"]
        batch: 5
        template: plain
      example_advantages: {{op: fill, rows: examples, value: 0.5, out: {{example_advantages: advantages}}}}
"""
READ = ("tokens", "loss_mask", "advantages", "old_logprobs")


def recorded(run: str) -> dict[str, list[Any]]:
    """The columns of the update in the first iteration, a tensor per row."""
    columns: dict[str, list[Any]] = {}
    for path in steps_of(Path(run))[1].glob("*.parquet"):
        names = {name.partition("/")[0]: name for name in about(path).types if "+" in about(path).domain}
        for name, column in read(path, [*names.values()]).items() if names else ():
            values, offsets = torch.tensor(column.values), torch.tensor(column.offsets)
            columns[name.partition("/")[0]] = list(values.split(offsets.diff().tolist()))
    return columns


def reference(columns: dict[str, list[Any]]) -> tuple[float, float]:
    """The loss and the norm of its gradient in float64, row by row, before any update."""
    from transformers import AutoModelForCausalLM

    path = Path(os.environ["RLGRAPH_TEST_FILES"], "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    count = sum(int(mask.sum()) for mask in columns["loss_mask"])
    total = 0.0
    for tokens, mask, advantages, old in zip(*(columns[name] for name in READ), strict=True):
        logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        logprobs = logits.gather(1, tokens[1:, None])[:, 0]
        ratio = (logprobs - old[1:].double()).exp()
        loss = torch.maximum(-advantages[1:] * ratio, -advantages[1:] * ratio.clamp(0.8, 1.2))
        part = loss[mask[1:]].sum() / count
        part.backward()
        total += part.item()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return total, norm.item()


def check(run: str) -> None:
    columns = recorded(run)
    assert {*READ} <= columns.keys() and len(columns["tokens"]) == 7 * 4 + 5
    filled = [row for row in columns["advantages"] if (row == 0.5).all()]
    assert len(filled) == 5
    loss, norm = reference(columns)
    (line,) = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    assert line["update_policy/loss"] == pytest.approx(loss, abs=1e-5)
    assert line["update_policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("devices", [1, 2])
def test_the_gradient_is_that_of_all_rows_on_any_number_of_devices(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    Path("union.yaml").write_text(GRAPH)
    run_on_devices("union.yaml", "--devices", str(devices), "--run-dir", "kept")
    check("kept")


@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("micro_tokens", [40, 4000])
def test_the_gradient_is_that_of_all_rows_in_micro_batches_of_any_size(micro_tokens: int) -> None:
    Path("union.yaml").write_text(GRAPH)
    settings = (f"models.policy.train.micro_tokens={micro_tokens}",)
    run_graph("union.yaml", settings, 1, run_dir=Path("kept"), inline=True)
    check("kept")
