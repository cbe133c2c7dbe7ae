"""Real text through real weights: SGLang's log-probs of SmolLM2-135M-Instruct are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import smollm
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model() -> str:
    return smollm.folder_or_skip()


@pytest.fixture(scope="module")
def engine(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    engine = SglangEngine(model, max_cached_tokens=4096, logs=tmp_path_factory.mktemp("logs"))
    try:
        yield engine
    finally:
        engine.close()


def test_samples_have_the_log_probs_of_transformers(engine: SglangEngine, model: str) -> None:
    theirs = AutoTokenizer.from_pretrained(model)
    assert not [*Path(engine.supervisor.logs).glob("tokenizer-*")], "SGLang reads this tokenizer by itself"
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine.load_weights(((name, tensor.detach()) for name, tensor in plain.named_parameters()), 0)
    prompts = []
    for question, _ in smollm.questions(200):
        turns = [{"role": "user", "content": question}]
        prompts.append(list(theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]))
    made = engine.generate([Request(prompt, [number]) for number, prompt in enumerate(prompts)], Sampling(24))
    for prompt, (drawn,) in zip(prompts, made, strict=True):
        wanted = smollm.expected_logprobs(plain, [*prompt, *drawn.tokens], len(prompt))
        torch.testing.assert_close(torch.tensor(drawn.logprobs), wanted, rtol=0, atol=1e-4)
