"""Families that are trained: names in and out, log-probs, updates and exports, against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, ROWS, build, expected, objective, plain, scored
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.weights import pretrained
from rlgraph.runtime.engines.weights.naming import views_of
from share import rest_nightly

# a dense family, one with norms on heads, one with windows, a mixture and one with attention of its own
BY_DAY = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("family", rest_nightly(FAMILIES, lambda family: family in BY_DAY))
def test_a_family_is_scored_trained_and_given_away(one_rank: None, tmp_path: Path, family: str) -> None:
    path = build(tmp_path, family)
    stored, model = load_file(path / "model.safetensors"), plain(path)
    shape = pretrained.shape_of(ModelFiles(str(path)), AutoModelForCausalLM, {}, torch.float32)
    assert pretrained.reads_by_rows(shape, views_of(shape, stored), pretrained.weights_of(str(path)), ())
    engine = FsdpEngine.of(str(path), optimizer={"lr": 1e-2, "max_grad_norm": 1e9})
    torch.testing.assert_close(dict(engine.weights()), stored, rtol=0, atol=0)

    with torch.no_grad():
        logprobs = expected(model)
    torch.testing.assert_close(engine.logprobs(**scored()).values, logprobs, rtol=1e-4, atol=1e-5)
    metrics = engine.update(scored(), objective, torch.arange(len(ROWS)), len(ROWS))
    loss = -expected(model).sum() / scored()["loss_mask"].values.sum()
    loss.backward()
    trained = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in trained]))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)

    engine.export(str(tmp_path / "exported"))
    written = load_file(tmp_path / "exported/model.safetensors")
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in stored.items()}
    with torch.no_grad():
        again = expected(plain(tmp_path / "exported"))
    torch.testing.assert_close(engine.logprobs(**scored()).values, again, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(again, logprobs, atol=1e-3)
