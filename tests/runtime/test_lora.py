"""Adapters: what trains, what is given away, and that nothing else about the engine changes.

This file as a script trains adapters on two ranks.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked, launch
from safetensors import safe_open

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

ADAM = {"lr": 3e-2, "eps": 1e-3}
LORA = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
ROWS, VOCABULARY = 6, 25
CASES: dict[str, dict[str, Any]] = {
    "lm": {"lora": LORA},
    "layers": {"lora": LORA, "reshard": True, "recompute": True},
    "value": {"lora": {**LORA, "targets": "all-linear"}, "head": "value", "seed": 7},
    "bfloat16": {"lora": LORA, "dtype": "bfloat16"},
}


def write_model(directory: Path) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**shape, vocab_size=VOCABULARY, num_hidden_layers=2, tie_word_embeddings=True)
    config.initializer_range = 0.2
    Qwen2ForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(directory)
    return str(directory)


def columns(rows: torch.Tensor) -> dict[str, Ragged]:
    tokens = Ragged.of([[(5 * r + 3 * t) % VOCABULARY for t in range(4 + r)] for r in rows.tolist()])
    return {"tokens": tokens, "loss_mask": tokens.like(torch.ones(len(tokens.values), dtype=torch.bool))}


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    if "new_values" in batch:
        return (batch["new_values"].values - 1).square().sum() / totals.tokens, {}
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def update(engine: FsdpEngine, epochs: int = 3) -> dict[str, float]:
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    return engine.update(columns(rows), objective, rows, ROWS, epochs=epochs)


def logprobs(engine: FsdpEngine) -> torch.Tensor:
    return engine.logprobs(**columns(torch.arange(ROWS))).values


def measure(root: Path, case: str) -> dict[str, Any]:
    engine = FsdpEngine.of(str(root / "model"), optimizer=ADAM, **CASES[case])
    found: dict[str, Any] = {"metrics": update(engine), "weights": dict(engine.weights())}
    engine.save(str(root / f"saved-{case}-{engine.group.size()}"))
    found["next"] = update(engine)
    return found


def main(rank: int, root: Path) -> None:
    torch.save({case: measure(root, case) for case in CASES}, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def root(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    write_model(root / "model")
    launch(__file__, root)
    return root


@pytest.fixture
def engine(root: Path) -> FsdpEngine:
    return FsdpEngine.of(str(root / "model"), optimizer=ADAM, lora=LORA)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(root: Path, case: str) -> None:
    one, (first, second) = (
        measure(root, case),
        [torch.load(root / f"rank-{rank}.pt")[case] for rank in (0, 1)],
    )
    tolerance = 1e-4 if case != "bfloat16" else 0.05
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, one, rtol=tolerance, atol=tolerance)
    again = FsdpEngine.of(str(root / "model"), optimizer=ADAM, **CASES[case])
    again.load(str(root / f"saved-{case}-1"))
    assert update(again) == one["next"]


@pytest.mark.parametrize("case", CASES)
def test_only_adapters_and_a_new_head_train(root: Path, case: str) -> None:
    engine = FsdpEngine.of(str(root / "model"), optimizer=ADAM, **CASES[case])
    names = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert names and all(".lora_" in name or name.startswith("score.") for name in names)
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in engine.model.named_parameters() if name in names}
    assert {p.dtype for p in engine.parameters} == {torch.float32}
    engine.save(str(root / f"own-{case}"))
    with safe_open(root / f"own-{case}" / "shard-00000-of-00001.safetensors", "pt") as saved:
        assert {name.partition(".")[2] for name in saved.keys()} == names  # noqa: SIM118


def test_an_adapter_begins_as_the_model_and_leaves_it_as_it_is(root: Path, engine: FsdpEngine) -> None:
    plain = logprobs(FsdpEngine.of(str(root / "model"), frozen=True))
    assert logprobs(engine).equal(plain)
    metrics = [update(engine, epochs=1)["loss"] for _ in range(8)]
    assert metrics[-1] < 0.9 * metrics[0]
    assert (logprobs(engine) - plain).abs().max() > 0.1
    assert logprobs(FsdpEngine.of(str(root / "model"), frozen=True, base=engine)).equal(plain)
    before = logprobs(engine)
    engine.offload(["parameters", "optimizer"])
    engine.reload(["parameters", "optimizer"])
    assert logprobs(engine).equal(before)


def test_merged_weights_are_the_adapted_model(root: Path, engine: FsdpEngine, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    update(engine)
    plain = AutoModelForCausalLM.from_pretrained(root / "model")
    assert [name for name, _ in engine.weights()] == [name for name, _ in plain.named_parameters()]
    engine.export(str(tmp_path / "exported"))
    ids = torch.arange(20).reshape(2, 10)
    expected = engine.model(input_ids=ids).logits
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert {name for name, _ in whole.named_parameters()} == {name for name, _ in plain.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        beside = PeftModel.from_pretrained(plain, tmp_path / "exported" / "adapter")
    for model in whole, beside:
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_loads_by_itself_wherever_it_is_asked_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(root)
    engine = FsdpEngine.of("model", optimizer=ADAM, lora=LORA)  # a path from where the run is started
    update(engine)
    engine.export(str(tmp_path / "exported"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exported" / "adapter")
    ids = torch.arange(20).reshape(2, 10)
    expected = engine.model(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_copy_has_the_adapters_merged(root: Path, engine: FsdpEngine) -> None:
    update(engine)
    frozen = FsdpEngine.of(str(root / "model"), frozen=True)
    frozen.copy(engine)
    torch.testing.assert_close(logprobs(frozen), logprobs(engine), rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_not_there_is_refused(root: Path) -> None:
    lora = {**LORA, "targets": ["q_proj", "query"]}
    with pytest.raises(
        ValueError, match="no decoder layer has a linear query; there are down_proj, gate_proj"
    ):
        FsdpEngine.of(str(root / "model"), optimizer=ADAM, lora=lora)


if __name__ == "__main__":
    forked(main, 2)
