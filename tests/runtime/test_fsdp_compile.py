"""Compiled decoder layers against the same layers as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")


@pytest.fixture
def path(one_rank: None, tmp_path: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 13}
    LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def columns() -> dict[str, Ragged]:
    tokens = Ragged.of([[(5 * row + 3 * t) % 13 for t in range(4 + 3 * row)] for row in range(3)])
    return {"tokens": tokens, "loss_mask": tokens.like(torch.ones(len(tokens.values), dtype=torch.bool))}


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


@pytest.mark.nightly
@compiler
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it is built from and looks at
def test_compiled_layers_say_the_same_and_train_the_same(path: str) -> None:
    found = []
    for compiled in (False, True):
        engine = FsdpEngine.of(
            path, optimizer={"lr": 1e-2, "eps": 1e-3}, micro_tokens=10, compile=compiled, recompute=True
        )
        scores = engine.logprobs(**columns()).values
        metrics = engine.update(columns(), objective, torch.arange(3), 3)
        found.append((scores, metrics, dict(engine.weights())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
