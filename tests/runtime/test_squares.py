"""Sums of squared probabilities: chunk by chunk against whole logits, and through the engine and a graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlgraph.costs import limits
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.batching import Budget, micro_batches
from rlgraph.runtime.engines.fsdp.scoring import token_entropies, token_scores, token_squares
from rlgraph.runtime.run import run_graph

VOCABULARY = 13
CHUNKS = (1, 3 * VOCABULARY, 10**6)  # a token, three, all


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_are_the_softmax_of_whole_logits(
    chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.setattr(limits, "LOGITS", chunk)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).double().eval()
    tokens = Ragged.of([[1, 5, 7, 3, 2, 9], [4, 4, 12], [0, 11, 3, 8]])
    mask = Ragged.of([[0, 0, 1, 1, 0, 1], [0, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    (batch,) = micro_batches({"tokens": tokens, "loss_mask": mask}, Budget(1000), torch.device("cpu"))
    with torch.no_grad():
        logprobs, squares = token_squares(model, batch, temperature)
        expected = []
        for row, written in zip(tokens.tolist(), mask.tolist(), strict=True):
            logits = model(input_ids=torch.tensor([row]).long()).logits[0] / temperature
            p = torch.softmax(logits, -1).square().sum(-1)
            expected += [float(p[t - 1]) for t, mine in enumerate(written) if mine]
        plain, _ = token_scores(model, batch, temperature, "none")
        again, entropies = token_entropies(model, batch, temperature)
        _, measured = token_scores(model, batch, temperature, "detached")
    assert sorted(squares.tolist()) == pytest.approx(sorted(expected), abs=1e-12)
    assert torch.equal(logprobs, plain), "as the pass without them has it"
    assert torch.equal(again, plain), "likewise"
    assert measured is not None
    torch.testing.assert_close(entropies, measured, rtol=0, atol=1e-12)


def test_the_graph_trains_on_it(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    settings = ["models.policy.path=demo_files/model", "prompts.files=[demo_files/train.parquet]"]
    settings += [
        "prompts.batch=4",
        "prompts.template=plain",
        "prompts.answer_after=null",
        "rollout.n=4",
        "rollout.max_new_tokens=6",
    ]
    settings += ["rewards.op=reward.exact", "update_policy.minibatches=2", "schedule.save_every=1"]
    run_graph("optimal_token_baseline", settings, 1, steps=1, inline=True, run_dir=Path("run"))
    rows = [json.loads(line) for line in Path("run/samples/step-000001.jsonl").read_text().splitlines()]
    for row in rows:
        for written, logprob, square in zip(
            row["loss_mask"], row["old_logprobs"], row["squares"], strict=True
        ):
            assert square <= 1 and (square > 0) == written
            # the squares of all tokens' probabilities hold that of the one that was sampled
            assert square >= torch.tensor(logprob).exp() ** 2 - 1e-3 or not written
