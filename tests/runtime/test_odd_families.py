"""Families that differ from most in one thing: their weights, windows, masks or outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_family import build
from families import expected, scored
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlgraph.costs.models.fields import TEXTS
from rlgraph.runtime.engines.fsdp import preflight
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.packing import packs
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.transformers import load
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.weights import pretrained
from rlgraph.syntax.model_settings import Train

# one with parameters that are not on the meta device as all others are; windows of its own; a mask of two
# dimensions; outputs that others lack; ids that are read for their shape; a decoder within its base
ODD = ["diffllama", "gpt_neo", "openai-gpt", "gpt2", "gemma4_text", "opt"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ODD)
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path, model = build(tmp_path, kind)
    with torch.no_grad():
        wanted = expected(model)
    engine = FsdpEngine.of(str(path), frozen=True)
    torch.testing.assert_close(engine.logprobs(**scored()).values, wanted, rtol=1e-5, atol=1e-5)
    assert packs(engine.model) == (kind in ("diffllama", "gpt2", "opt"))


@pytest.mark.parametrize("kind", ["gpt_neo", "openai-gpt", "bert", "hrm_text", "moshi"])
def test_what_the_embedded_engine_does_not_run_is_refused_by_name(kind: str) -> None:
    assert load.unfit(AutoConfig.for_model(kind)).startswith(f"{kind}: ")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "bert",
            "its attention sees later tokens, as an encoder's does; models of this type can't be trained",
        ),
        (
            "llama4_text",
            "transformers' Llama4ForCausalLM has no decoder by itself; models of this type can't",
        ),
        (
            "hrm_text",
            "is not a part of the rows of one parameter in transformers; models of this type can't be",
        ),
    ],
)
def test_what_can_not_be_trained_is_said_before_a_run(tmp_path: Path, kind: str, why: str) -> None:
    path, _ = build(tmp_path, kind)
    law = preflight.unfit(ModelFiles(str(path)), "lm", Train())
    assert law.startswith(f"{kind}: ") and why in law


@pytest.mark.parametrize("kind", [*TEXTS, "llava"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_vision_language_model_is_refused_by_name(kind: str, head: str) -> None:
    config = AutoConfig.for_model(kind)
    assert type(config) in AutoModelForImageTextToText._model_mapping
    assert type(config) not in AutoModelForCausalLM._model_mapping
    law = pretrained.unfit(config, head)
    assert law.startswith(f"{kind}: vision-language models are not supported yet")


def test_weights_are_read_as_they_stand_in_the_files(tmp_path: Path) -> None:
    """Behind reading them transformers sets the padding row of Youtu's embeddings to zero."""
    path, model = build(tmp_path, "youtu")
    engine = TransformersEngine(str(path))
    engine.load_pretrained()
    assert engine.weights["model.embed_tokens.weight"].equal(model.get_input_embeddings().weight)
