"""Scores computed in chunks against whole logits and autograd, in float64; what the engine makes of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlgraph.costs import limits
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp import scoring
from rlgraph.runtime.engines.fsdp.batching import Budget, micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.scoring import token_scores

VOCABULARY = 13
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
BUILT = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=4, final_logit_softcapping=2.0)),
    "scaled up": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=3.0)),
    "scaled down": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "bias": lambda: PhiForCausalLM(PhiConfig(**SHAPE)),
}
ENTROPIES = ("none", "detached", "differentiable")
CHUNKS = (1, 3 * VOCABULARY, 10**6)  # a token, three, all


def built(name: str) -> Any:
    torch.manual_seed(0)
    return BUILT[name]().double().eval()


def batch() -> MicroBatch:
    tokens = Ragged.of([[1, 5, 7, 3, 2, 9], [4, 4, 12], [0, 11, 3, 8]])
    mask = Ragged.of([[0, 0, 1, 1, 0, 1], [0, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    (found,) = micro_batches({"tokens": tokens, "loss_mask": mask}, Budget(1000), torch.device("cpu"))
    return found


def whole(model: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores from the whole logits, by autograd's own rules."""
    rows = batch()
    logits = rows.picked(model(**rows.inputs, use_cache=False).logits)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(rows.labels), distribution.entropy()


def total(scores: scoring.Scores) -> torch.Tensor:
    """A number that depends on every score by a weight of its own."""
    weights = torch.linspace(-1.0, 2.0, len(scores[0]), dtype=torch.float64)
    found = (scores[0] * weights).sum()
    if scores[1] is not None and scores[1].requires_grad:
        found = found + (scores[1] * weights.flip(0).square()).sum()
    return found


def gradients(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("name", BUILT)
def test_scores_and_gradients_are_those_of_whole_logits(
    name: str, entropy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(name)
    logprobs, entropies = whole(model, 0.7)
    wanted = entropies if entropy == "differentiable" else entropies.detach()
    expected = gradients(model, total((logprobs, wanted)))
    for chunk in CHUNKS:
        monkeypatch.setattr(limits, "LOGITS", chunk)
        found = token_scores(model, batch(), 0.7, entropy)
        torch.testing.assert_close(found[0], logprobs)
        assert (found[1] is None) == (entropy == "none")
        if found[1] is not None:
            torch.testing.assert_close(found[1], entropies)
        torch.testing.assert_close(gradients(model, total(found)), expected)


@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("name", BUILT)
def test_gradients_are_finite_differences(name: str, entropy: str) -> None:
    """Of hidden states and head: in a decoder, norms round to float32, which differences do not survive."""
    model, generator = built(name), torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([3, 0, 12, 3, 7]), list(model.lm_head.parameters())
    apply = partial(scoring._Scores.apply, model, 2, 1.3, entropy, False, labels)
    assert torch.autograd.gradcheck(
        lambda *given: apply(*given)[: 1 + (entropy != "none")], (hidden, *weights)
    )


def test_an_entropy_alone_has_its_gradient() -> None:
    model = built("tied")
    expected = gradients(model, whole(model, 1.0)[1].sum())
    _, entropies = token_scores(model, batch(), 1.0, "differentiable")
    assert entropies is not None
    torch.testing.assert_close(gradients(model, entropies.sum()), expected)


def test_one_weight_for_all_chunks_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("untied").bfloat16()
    exact = built("untied")
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    monkeypatch.setattr(limits, "LOGITS", VOCABULARY)
    found = gradients(model, token_scores(model, batch(), 1.0, "none")[0].sum())["lm_head.weight"]
    expected = gradients(exact, token_scores(exact, batch(), 1.0, "none")[0].sum())["lm_head.weight"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("name", BUILT)
def test_what_is_kept_has_the_gradients_of_what_is_computed_again(name: str, entropy: str) -> None:
    labels, found = torch.tensor([3, 0, 12, 3, 7]), []
    for keep in (True, False):
        model, generator = built(name).float(), torch.Generator().manual_seed(1)
        hidden = torch.randn(5, 8, generator=generator, requires_grad=True)
        weights = list(model.lm_head.parameters())
        scores = scoring._Scores.apply(model, 2, 1.3, entropy, keep, labels, hidden, *weights)
        value = scores[0].square().sum()
        value = value + scores[1].square().sum() if entropy == "differentiable" else value
        value.backward()
        found.append([scores[0], hidden.grad, *(weight.grad for weight in weights)])
    for kept, again in zip(*found, strict=True):
        assert kept.equal(again)


@pytest.mark.parametrize(("chunk", "times"), [(2 * VOCABULARY, 2), (10**6, 1)])
def test_logits_are_computed_again_only_where_they_are_of_several_chunks(
    chunk: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOGITS", chunk)
    model, counted, computed = built("untied"), [0], scoring.logits_of

    def counting(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        counted[0] += len(hidden)
        return computed(model, hidden)

    monkeypatch.setattr(scoring, "logits_of", counting)
    logprobs, _ = token_scores(model, batch(), 1.0, "detached")
    logprobs.sum().backward()
    assert counted[0] == times * len(logprobs)


def test_kept_pieces_are_scored_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("untied")
    whole = token_scores(model, batch(), 1.0, "differentiable")
    expected = gradients(model, total(whole))
    monkeypatch.setattr(limits, "head_rows", lambda *_: (2, True))
    found = token_scores(model, batch(), 1.0, "differentiable")
    torch.testing.assert_close(found[0], whole[0])
    torch.testing.assert_close(gradients(model, total(found)), expected)


def objective(columns: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return (columns["entropy"].values - columns["logprobs"].values).sum() / totals.tokens, {}


@pytest.mark.parametrize("reshard", [False, True])
def test_an_update_does_not_depend_on_the_chunk(
    one_rank: None, tmp_path: Path, reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUILT["tied"]().save_pretrained(tmp_path / "model")
    columns, rows = batch().columns, torch.arange(3)
    columns = {name: columns[name] for name in ("tokens", "loss_mask")}
    found = []
    for chunk in CHUNKS:
        monkeypatch.setattr(limits, "LOGITS", chunk)
        options: dict[str, Any] = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, "reshard": reshard}
        engine = FsdpEngine.of(str(tmp_path / "model"), micro_tokens=9, **options)
        metrics = engine.update(columns, objective, rows, 3, epochs=2, entropy=True)
        scores = engine.logprobs(columns["tokens"], columns["loss_mask"], 0.5).values
        found.append((metrics, scores, dict(engine.weights())))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_the_head_never_sees_more_than_a_chunk(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUILT["tied"]().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(limits, "LOGITS", 2 * VOCABULARY)
    engine = FsdpEngine.of(str(tmp_path / "model"), optimizer={"lr": 1e-2})
    seen = []
    engine.model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].shape.numel()))
    columns = batch().columns
    engine.logprobs(columns["tokens"], columns["loss_mask"])
    engine.update(columns, objective, torch.arange(3), 3)
    assert seen == [2 * VOCABULARY] * 4 + [2 * VOCABULARY] * 8


def test_a_head_of_its_own_is_gathered_once_for_all_chunks(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUILT["untied"]().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(limits, "LOGITS", VOCABULARY)
    engine = FsdpEngine.of(str(tmp_path / "model"), optimizer={"lr": 1e-2}, reshard=True, dtype="bfloat16")
    gathered, unsharded = list[str](), FSDPParamGroup._to_unsharded

    def noted(group: Any) -> None:
        gathered.append(group._module_fqn or "norm")
        unsharded(group)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", noted)
    columns = batch().columns
    engine.logprobs(columns["tokens"], columns["loss_mask"])
    passed = ["norm", "model.embed_tokens", "model.layers.0", "lm_head"]
    assert gathered == passed
    engine.update(columns, objective, torch.arange(3), 3)
    assert gathered[len(passed) :] == [*passed, "model.layers.0"], "the backward pass gathers layers alone"


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_brings_scores_closer_to_those_of_float32(
    one_rank: None, tmp_path: Path, tied: bool, reshard: bool
) -> None:
    """Of a model with logits around 30, as large ones have: the body's rounding is far below theirs."""
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 64, "initializer_range": 0.02, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.mul_(25.0))
    model.save_pretrained(tmp_path / "model")
    columns, scores = batch().columns, {}
    columns = {name: columns[name] for name in ("tokens", "loss_mask")}
    settings = {"float32": ("float32", None), "wide": ("bfloat16", "float32"), "narrow": ("bfloat16", None)}
    for kind, (dtype, head) in settings.items():
        options: dict[str, Any] = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, "reshard": reshard}
        engine = FsdpEngine.of(str(tmp_path / "model"), dtype=dtype, head_dtype=head, **options)
        scores[kind] = engine.logprobs(**columns).values
        before = {name: weight.clone() for name, weight in engine.weights()}
        engine.update(columns, objective, torch.arange(3), 3)
        assert any(not weight.equal(before[name]) for name, weight in engine.weights())
    far = {kind: float((found - scores["float32"]).square().mean().sqrt()) for kind, found in scores.items()}
    assert 0 < far["wide"] < 0.7 * far["narrow"]


@pytest.mark.parametrize("name", BUILT)
def test_a_float32_head_rounds_no_logit(name: str) -> None:
    """Its logits and gradients are those of a float32 model with the same hidden states and weights."""
    wide, exact = built(name).bfloat16(), built(name)
    exact.load_state_dict({name: tensor.float() for name, tensor in wide.state_dict().items()})
    exact.float()
    wide.lm_head.forward = partial(scoring._wide_logits, wide.lm_head)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.tensor([3, 0, 12, 3, 7])
    found, expected = (
        scoring._Scores.apply(
            model, 2, 1.3, "none", False, labels, hidden.to(model.dtype), *model.lm_head.parameters()
        )[0]
        for model in (wide, exact)
    )
    assert found.dtype == torch.float32 and found.equal(expected)
    for scores in found, expected:
        scores.sum().backward()
    gradient, wanted = wide.lm_head.weight.grad, exact.lm_head.weight.grad
    torch.testing.assert_close(gradient.float(), wanted, rtol=0.02, atol=0.02)
