"""The embedded serve engine against transformers' own forward and ``generate``, on tiny random models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from penalties import assert_drawn_so
from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

EOS = 1
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**SIZES, sliding_window=6),
    "qwen2-half-window": Qwen2Config(
        **SIZES,
        sliding_window=6,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
PROMPTS = [
    [5, 6, 7],
    [8],
    [9, 10, 11, 12, 13, 14, 15],
    [16, 17],
    [18, 19, 20, 21],
    [22, 23, 24],
    [25] * 9,
    [7, 5],
]


def save(directory: Path, config: PreTrainedConfig) -> str:
    """A random model and a tokenizer of one token a character."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a weight left out shows
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    characters = ["<pad>", "<eos>", *(chr(48 + i) for i in range(SIZES["vocab_size"] - 2))]
    inner = FastTokenizer(WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    inner.pre_tokenizer = Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save(tmp_path_factory.mktemp(name), config) for name, config in CONFIGS.items()}


def engine_of(path: str, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(path, **options)
    engine.load_pretrained()
    return engine


@pytest.fixture(scope="module")
def engine(paths: dict[str, str]) -> TransformersEngine:
    return engine_of(paths["qwen2-tied"])


def requests_of(count: int = 8) -> list[Request]:
    """Ragged prompts, a different number of samples each."""
    seeds = [[100 * i + k for k in range(1 + i % 4)] for i in range(count)]
    return [Request(PROMPTS[i], seeds[i]) for i in range(count)]


def tokens_of(outputs: list[list[Generation]]) -> list[list[list[int]]]:
    return [[list(generation.tokens) for generation in row] for row in outputs]


def forward_logprobs(path: str, prompt: list[int], new: list[int], temperature: float) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_a_plain_forward(paths: dict[str, str], name: str) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=1.3, top_p=0.9, top_k=12)
    requests = requests_of()
    for request, row in zip(requests, engine_of(paths[name]).generate(requests, sampling), strict=True):
        assert len(row) == len(request.seeds)
        for generation in row:
            expected = forward_logprobs(paths[name], request.prompt, generation.tokens, 1.3)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_is_generate_of_transformers(paths: dict[str, str], engine: TransformersEngine) -> None:
    outputs = engine.generate([replace(r, seeds=[0]) for r in requests_of()], Sampling(24, temperature=0))
    model = AutoModelForCausalLM.from_pretrained(paths["qwen2-tied"], dtype=torch.float32)
    for prompt, [generation] in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        assert list(generation.tokens) == expected[0, len(prompt) :].tolist()
        logprobs = forward_logprobs(paths["qwen2-tied"], prompt, generation.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(generation.logprobs), logprobs, atol=1e-4, rtol=0)


def test_top_k_of_one_and_tiny_top_p_are_greedy(engine: TransformersEngine) -> None:
    greedy = tokens_of(engine.generate(requests_of(), Sampling(12, temperature=0)))
    assert tokens_of(engine.generate(requests_of(), Sampling(12, top_k=1))) == greedy
    assert tokens_of(engine.generate(requests_of(), Sampling(12, top_p=1e-9))) == greedy


def test_a_sample_does_not_depend_on_its_batch(engine: TransformersEngine) -> None:
    sampling = Sampling(max_new_tokens=20)
    together = tokens_of(engine.generate(requests_of(), sampling))
    alone = [tokens_of(engine.generate([request], sampling))[0] for request in requests_of()]
    assert together == alone
    backwards = [replace(request, seeds=request.seeds[::-1]) for request in requests_of()[::-1]]
    assert [row[::-1] for row in tokens_of(engine.generate(backwards, sampling))[::-1]] == together
    assert len({tuple(tokens) for row in together for tokens in row}) > 15


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_rows": 1},
        {"max_rows": 3},
        {"max_cached_tokens": 64},
        {"prefill_tokens": 1},
        {"prefill_tokens": 16},
    ],
)
def test_bounds_do_not_change_samples(
    paths: dict[str, str], engine: TransformersEngine, bounds: dict[str, int]
) -> None:
    expected = tokens_of(engine.generate(requests_of(), Sampling(20)))
    assert (
        tokens_of(engine_of(paths["qwen2-tied"], **bounds).generate(requests_of(), Sampling(20))) == expected
    )


def test_a_continued_sample_goes_on_as_if_never_cut(engine: TransformersEngine) -> None:
    whole = engine.generate([Request(PROMPTS[0], [7])], Sampling(12))[0][0].tokens
    part = engine.generate([Request(PROMPTS[0], [7])], Sampling(5))[0][0].tokens
    rest = engine.generate([Request([*PROMPTS[0], *part], [7])], Sampling(7))[0][0].tokens
    assert [*part, *rest] == list(whole)


def test_end_token_is_kept_and_says_stop(engine: TransformersEngine) -> None:
    rows = engine.generate([Request(prompt, range(16)) for prompt in PROMPTS], Sampling(24))
    generations = [generation for row in rows for generation in row]
    stopped = [g for g in generations if g.finish == "stop"]
    assert 10 < len(stopped) < len(generations)
    assert all(g.tokens[-1] == EOS and EOS not in g.tokens[:-1] for g in stopped)
    assert all(len(g.tokens) == 24 and EOS not in g.tokens for g in generations if g.finish == "length")
    assert {g.finish for g in generations} == {"stop", "length"}
    assert all(len(g.tokens) == len(g.logprobs) for g in generations)


def test_stop_ids_come_from_every_config(paths: dict[str, str], tmp_path: Path) -> None:
    save(tmp_path, CONFIGS["qwen2"])
    assert TransformersEngine(str(tmp_path)).stops.tolist() == [EOS]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert TransformersEngine(str(tmp_path)).stops.tolist() == [EOS, 2, 3]
    assert ModelFiles(str(tmp_path), {}).tokenizer().model_stop_ids == [3, 2]


def test_nothing_to_do(engine: TransformersEngine) -> None:
    assert engine.generate([], Sampling(4)) == []
    assert engine.generate([Request([5], [])], Sampling(4)) == [[]]
    empty, [one] = engine.generate([Request([5] * 9, []), Request([5], [0])], Sampling(1))
    assert empty == []
    assert len(one.tokens) == 1


def test_prompt_beyond_the_context(engine: TransformersEngine) -> None:
    fits = [Request([5] * 60, [0]), Request([5], [0])]
    assert len(engine.generate(fits, Sampling(4))[0][0].tokens) <= 4
    with pytest.raises(ValueError, match=r"request 1: 61 prompt.* and 4 new .*context of 64"):
        engine.generate([Request([5], [0]), Request([5] * 61, [0])], Sampling(4))


def test_empty_prompt_and_no_tokens_are_errors(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="request 0: 0 prompt tokens"):
        engine.generate([Request([], [0])], Sampling(4))
    with pytest.raises(ValueError, match="0 new tokens"):
        engine.generate([Request([5], [0])], Sampling(0))


@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
def test_weights_by_sync(paths: dict[str, str], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32)
    engine, loaded = TransformersEngine(paths[name]), engine_of(paths[name])
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate([Request([5], [0])], Sampling(4))
    engine.load_weights(((n, p.double()) for n, p in model.named_parameters()), version=3)
    assert engine.version == 3
    assert engine.generate(requests_of(), Sampling(8)) == loaded.generate(requests_of(), Sampling(8))
    with torch.no_grad():
        model.get_input_embeddings().weight.neg_()
    engine.load_weights(model.named_parameters(), version=4)
    assert tokens_of(engine.generate(requests_of(), Sampling(8))) != tokens_of(
        loaded.generate(requests_of(), Sampling(8))
    )


def test_weights_that_do_not_fit(paths: dict[str, str]) -> None:
    engine = engine_of(paths["qwen2-tied"])
    weights = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    first = next(iter(weights))
    with pytest.raises(ValueError, match=r"1 of \d+ weights were not given: model.norm.weight"):
        engine.load_weights([(n, t) for n, t in weights.items() if n != "model.norm.weight"], 1)
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([Request([5], [0])], Sampling(4))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is not in the model"):
        engine.load_weights([*weights.items(), ("lm_head.weight", weights[first])], 1)
    with pytest.raises(ValueError, match=f"'{first}' came twice"):
        engine.load_weights([*weights.items(), (first, weights[first])], 1)
    with pytest.raises(ValueError, match=r"is \[1, 32\]; the model's is \[40, 32\]"):
        engine.load_weights([(first, weights[first][:1])], 1)


def test_nan_weights_are_an_error(paths: dict[str, str]) -> None:
    engine = engine_of(paths["qwen2"])
    engine.load_weights([(n, p * torch.nan) for n, p in engine.model.named_parameters()], 7)
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="NaN at version 7"):
            engine.generate(requests_of(), Sampling(4, temperature=temperature))


@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
def test_asleep_awake_and_loaded_it_generates_the_same(paths: dict[str, str], name: str) -> None:
    engine = engine_of(paths[name])
    weights = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    expected = engine.generate(requests_of(), Sampling(8))
    for version in (5, 6):
        engine.sleep(["weights"])
        assert engine.sleeping == {"weights"}
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in engine.model.parameters())
        engine.wake(["weights"])
        assert engine.sleeping == frozenset()
        assert engine.version == -1
        with pytest.raises(RuntimeError, match="no weights yet"):
            engine.generate(requests_of(), Sampling(8))
        engine.load_weights(weights.items(), version)
        assert engine.generate(requests_of(), Sampling(8)) == expected


def test_what_makes_no_sense_asleep_or_awake_is_refused(paths: dict[str, str]) -> None:
    engine = engine_of(paths["qwen2"])
    with pytest.raises(RuntimeError, match=r"wake of weights, which is done already; call sleep\(\['"):
        engine.wake(["weights"])
    with pytest.raises(ValueError, match="sleep knows no kv_cache; its parts are weights"):
        engine.sleep(["weights", "kv_cache"])
    engine.sleep([])
    assert engine.version == 0
    engine.sleep(["weights"])
    with pytest.raises(RuntimeError, match=r"sleep of weights, which is done already; call wake\(\['"):
        engine.sleep(["weights"])
    for call in (
        lambda: engine.generate(requests_of(), Sampling(8)),
        lambda: engine.load_weights([], 1),
        engine.load_pretrained,
    ):
        with pytest.raises(RuntimeError, match=r"asleep; call wake\(\['weights'\]\) and load_weights first"):
            call()
    engine.wake(["weights"])
    engine.load_pretrained()
    assert engine.generate(requests_of(), Sampling(8)) == engine_of(paths["qwen2"]).generate(
        requests_of(), Sampling(8)
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_asleep_it_gives_its_memory_back(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    engine = engine_of(save(tmp_path, Qwen2Config(**{**SIZES, **wide})))
    size = 4 * sum(parameter.numel() for parameter in engine.model.parameters())

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    awake = anonymous()
    engine.sleep(["weights"])
    assert size > 45e6
    assert awake - anonymous() > 0.8 * size


def test_unsupported_attention_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig

    save(tmp_path, CONFIGS["qwen2"])
    MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=40).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^mamba: .*; serve it with sglang"):
        TransformersEngine(str(tmp_path))


def test_bfloat16_keeps_rotary_frequencies_in_float32(paths: dict[str, str]) -> None:
    exact, rounded = engine_of(paths["llama"]), engine_of(paths["llama"], dtype="bfloat16")
    assert {p.dtype for p in rounded.model.parameters()} == {torch.bfloat16}
    for buffer, expected in zip(rounded.model.buffers(), exact.model.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, atol=0, rtol=0)
    request = [Request(PROMPTS[2], range(4))]
    for generation in rounded.generate(request, Sampling(12))[0]:
        expected = forward_logprobs(paths["llama"], PROMPTS[2], generation.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=0.5, rtol=0)


def test_engine_samples_the_models_distribution(paths: dict[str, str], engine: TransformersEngine) -> None:
    [row] = engine.generate([Request(PROMPTS[0], range(4000))], Sampling(1))
    observed = torch.tensor([g.tokens[0] for g in row]).bincount(minlength=40)
    model = AutoModelForCausalLM.from_pretrained(paths["qwen2-tied"], dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1) * 4000
    common = expected > 5
    assert common.sum() > 5
    assert ((observed - expected)[common] ** 2 / expected[common]).sum() < 2.5 * common.sum()


CHANGED = [
    Sampling(16, 1.0, repetition_penalty=1.7),
    Sampling(16, 0.8, presence_penalty=1.5),
    Sampling(16, 0.0, frequency_penalty=0.9),
    Sampling(16, 1.3, min_new_tokens=9),
    Sampling(16, 0.0, min_new_tokens=7, repetition_penalty=0.6, presence_penalty=-1.0, frequency_penalty=2.0),
]


@pytest.mark.parametrize("sampling", CHANGED, ids=str)
def test_penalties_are_those_of_a_plain_forward(
    engine: TransformersEngine, paths: dict[str, str], sampling: Sampling
) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths["qwen2-tied"])
    requests = [Request(prompt, [3, 4, 5]) for prompt in PROMPTS]
    plain = engine.generate(requests, replace(Sampling(16), temperature=sampling.temperature))
    made = engine.generate(requests, sampling)
    for request, many in zip(requests, made, strict=True):
        for one in many:
            assert_drawn_so(model, request, one, sampling, [EOS])
            assert len(one.tokens) > sampling.min_new_tokens or one.finish == "length"
    assert made != plain
    if sampling.min_new_tokens:
        assert any(len(one.tokens) < sampling.min_new_tokens for many in plain for one in many)


def test_a_sample_that_goes_on_needs_fewer_tokens_before_its_end(
    engine: TransformersEngine, paths: dict[str, str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths["qwen2-tied"])
    sampling = Sampling(8, 1.3, min_new_tokens=6)
    begun = [Request(prompt, [3, 4], drawn=drawn) for prompt in PROMPTS for drawn in (0, 4, 9)]
    for request, many in zip(begun, engine.generate(begun, sampling), strict=True):
        for one in many:
            assert_drawn_so(model, request, one, sampling, [EOS])
