"""Sizes of models against published counts; tests/runtime/test_sizes.py has them against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.model_size import known_models, padded, size_of
from rlgraph.costs.models.fields import TEXTS
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Target

# Parameters that the model cards and reports on the Hugging Face hub state, or that its safetensors sum to.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
}
# With the tower that sees pictures: 416,866,032 parameters, and two tensors that bring it to the hidden size.
SEEING = {"4b": 4_300_079_472, "12b": 12_187_325_040, "27b": 27_432_406_640}
TINY = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}


def folder(path: Path, config: dict[str, object]) -> str:
    (path / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6, "torch_dtype": "bfloat16"}))
    return str(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    assert size_of(name).parameters == PUBLISHED[name]


# layers, hidden size, heads, those of keys, size of the MLP, tied: table 1 of its report (arXiv 2407.10671)
QWEN2 = {
    "0.5B": (24, 896, 14, 2, 4864, True),
    "1.5B": (28, 1536, 12, 2, 8960, True),
    "7B": (28, 3584, 28, 4, 18944, False),
    "72B": (80, 8192, 64, 8, 29568, False),
}


@pytest.mark.parametrize("name", QWEN2)
def test_qwen2_has_the_shapes_of_its_report(name: str) -> None:
    config = size_of(f"Qwen/Qwen2-{name}-Instruct").config
    layers, hidden, heads, key_heads, mlp, is_tied = QWEN2[name]
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert (config.num_attention_heads, config.key_heads) == (heads, key_heads)
    assert (config.intermediate_size, config.tie_word_embeddings) == (mlp, is_tied)


@pytest.mark.parametrize("name", SEEING)
def test_the_text_of_gemma_is_what_its_tower_leaves(name: str) -> None:
    size = size_of(f"google/gemma-3-{name}-it")
    assert SEEING[name] - size.parameters == 416_866_032 + 1152 * size.config.hidden_size + 1152


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("Qwen/Qwen2.5-7B", 56),
        ("meta-llama/Llama-3.1-8B", 128),
        ("Qwen/Qwen3-8B", 144),
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2 / 2**10),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 24),  # of 12 of its 48 layers
    ],
)
def test_keys_and_values_of_a_token(name: str, kib: float) -> None:
    assert size_of(name).kv_bytes(2) == kib * 2**10


def test_a_window_bounds_cache_and_work() -> None:
    size = size_of("google/gemma-3-12b-it")  # 8 of 48 layers see all tokens, 40 of them 1,024
    layer = 2 * 8 * 256 * 2
    assert size.cache_bytes(2, 100) == 48 * layer * 100 == size.kv_bytes(2) * 100
    assert size.cache_bytes(2, 10_000) == layer * (8 * 10_000 + 40 * 1023)
    assert size.attention_flops(10_000) == 8 * 2 * 16 * 256 * 10_000**2
    weights = sum(size.layers) + size.embedding
    assert size.multiplied - weights == 40 * 1024 * 2 * 16 * 256


def test_a_state_is_as_large_after_any_number_of_tokens() -> None:
    size = size_of("Qwen/Qwen3-Next-80B-A3B-Instruct")  # 36 layers: 32 x 128 x 128, and 4 inputs of 8,192
    assert size.state_bytes(2) == 36 * (4 * 32 * 128 * 128 + 2 * 4 * 8192)
    assert size.cache_bytes(2, 1000) == 1000 * size.kv_bytes(2) + size.state_bytes(2)


def test_latent_attention_asks_the_latent_vector_of_each_token() -> None:
    size = size_of("deepseek-ai/DeepSeek-R1")
    assert size.asked == 61 * 128 * (512 + 64 + 512)
    assert size.attention_flops(10) == 61 * 128 * (192 + 128) * 100
    assert 36e9 < size.multiplied < 37e9  # 37B are active, with an embedding that is looked up


def test_a_value_head_is_one_row_and_a_bias() -> None:
    untied, tied = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B"
    assert size_of(untied).parameters - size_of(untied, "value").parameters == 152064 * 3584 - 3584 - 1
    assert size_of(tied, "value").parameters - size_of(tied).parameters == 896 + 1
    assert size_of(tied, "value").vocabulary == 1


def test_a_mixture_multiplies_with_the_experts_that_a_token_chooses() -> None:
    size = size_of("Qwen/Qwen3-30B-A3B")
    assert 3.0e9 < size.multiplied < 3.4e9  # A3B: 3.3 billion are active, of which the embedding is looked up
    assert size.touched(1) == pytest.approx(size.multiplied)
    assert size.touched(10_000) == pytest.approx(size.parameters - size.embedding, rel=1e-5)


@pytest.mark.parametrize("name", known_models())
def test_parts_make_the_whole(name: str) -> None:
    size = size_of(name)
    assert padded(size.root_tensors, 1) + sum(size.layers) == size.parameters
    assert size.touched(1) <= size.parameters


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-7B", "Qwen/Qwen2.5-Coder-7B-Instruct"]
)
def test_a_finetune_has_the_shapes_of_its_base(name: str) -> None:
    assert size_of(name).parameters == PUBLISHED["Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-30B-A3B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3"),
        ("zai-org/GLM-4.5-Base", "zai-org/GLM-4.5"),
        ("allenai/Olmo-3-7B-Think-SFT", "allenai/Olmo-3-7B"),
        ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-1124-7B"),
        ("allenai/Olmo-3-1025-7B", "allenai/Olmo-3-7B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen/Qwen3-235B-A22B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Mistral-Small-24B"),
    ],
)
def test_a_name_finds_the_card_of_its_shapes(name: str, card: str) -> None:
    assert size_of(name).config == size_of(card).config


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-3B"),
        ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-1.7B"),
        ("Qwen/Qwen3-VL-8B-Thinking", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-VL-235B-A22B-Instruct", "Qwen/Qwen3-235B-A22B"),
    ],
)
def test_a_model_that_sees_is_counted_by_its_text_and_has_a_longer_context(name: str, card: str) -> None:
    assert size_of(name).tensors == size_of(card).tensors
    assert size_of(name).config.max_position_embeddings is None


def test_a_config_in_the_cache_of_the_hub_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models--me--mine"
    (model / "snapshots/abc").mkdir(parents=True)
    folder(model / "snapshots/abc", TINY)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(GraphError, match="not in a cache of the hub"):
        size_of("me/mine")  # no branch says which of its snapshots is the newest
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    assert size_of("me/mine").parameters == size_of(str(model / "snapshots/abc")).parameters
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/hub").symlink_to(tmp_path)
    assert size_of("me/mine").parameters
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/home")
    assert size_of("me/mine").parameters
    (model / "refs/main").write_bytes(b"\xff")
    for name in ("me/mine", "/models/" + 20 * "some-experiment/"):  # longer than a name of a file may be
        with pytest.raises(GraphError, match="not in a cache of the hub") as caught:
            size_of(name)
        assert ("hf download" in str(caught.value)) == (name == "me/mine")


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    # embedding and head 512; a layer: q and o 2 * 64, k and v 2 * 32, MLP 3 * 128, norms 16; last norm 8
    assert size_of(folder(tmp_path, TINY)).parameters == 512 + 2 * (128 + 64 + 384 + 16) + 8


def test_an_unknown_model_says_how_to_give_one() -> None:
    with pytest.raises(GraphError, match=r"put the model's `config.json` into a folder") as caught:
        size_of("Qwen/Qwen2.5-8B")
    assert "hf download Qwen/Qwen2.5-8B config.json; a plan without --cluster" in str(caught.value)
    assert "did you mean `Qwen/Qwen2.5-" in str(caught.value)
    with pytest.raises(GraphError, match=r"put the model's `config.json` into a folder"):
        size_of("nobody/nothing")
    with pytest.raises(GraphError, match="only a run copies what is at a URL, and none has here") as caught:
        size_of("s3://models/Qwen2.5-9B")
    assert "hf download" not in str(caught.value)


def test_an_open_path_is_said_to_be_open() -> None:
    with pytest.raises(GraphError, match="still open"):
        size_of("???")


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"hidden_size": None}, "hidden_size"),
        (
            {"model_type": "rwkv"},
            r"rwkv: sizes (.*\n){2,5}  accepted: llama(.*\n)+?.*a plan without --cluster",
        ),
        ({"vocab_size": "many"}, "whole number"),
    ],
)
def test_a_config_that_is_wrong(tmp_path: Path, change: dict[str, object], law: str) -> None:
    with pytest.raises(GraphError, match=law):
        size_of(folder(tmp_path, {**TINY, **change}))


def test_a_config_that_lacks_a_field(tmp_path: Path) -> None:
    lacking = {name: value for name, value in TINY.items() if name != "vocab_size"}
    with pytest.raises(GraphError, match="has no `vocab_size`"):
        size_of(folder(tmp_path, lacking))


@pytest.mark.parametrize("target", [None, Target("h100-8")])
@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen3-VL-2B-Instruct",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    ],
)
def test_a_vision_language_model_is_refused_by_name(model: str, target: Target | None) -> None:
    with pytest.raises(GraphError, match="vision-language models are not supported yet") as refused:
        compile_graph("grpo", [f"models.policy.path={model}"], 1, target)
    (problem,) = refused.value.problems  # the reference has the same path
    assert f"models.policy.path: {model} " in problem.law and "models.policy.path=" in problem.remedy


@pytest.mark.parametrize("kind", TEXTS)
def test_a_folder_with_a_vision_language_model_is_refused(kind: str, tmp_path: Path) -> None:
    path = folder(tmp_path, {"model_type": kind, "text_config": TINY})
    with pytest.raises(GraphError, match="vision-language models are not supported yet"):
        compile_graph("grpo", [f"models.policy.path={path}"], 1)


def test_a_judge_at_an_endpoint_may_be_a_vision_language_model(tmp_path: Path) -> None:
    serve = "{engine: openai, openai: {addresses: ['http://one:8000']}}"
    judge = f"{{path: Qwen/Qwen2.5-VL-7B-Instruct, frozen: true, serve: {serve}}}"
    rewards = "{op: reward.judge, model: judge, prompt: 'Grade {response}'}"
    path = tmp_path / "judged.yaml"
    path.write_text(
        f"graph: judged\nextends: grpo\nedits:\n  - add: {{models.judge: {judge}}}\n"
        f"  - replace: {{rewards: {rewards}}}\n"
    )
    assert "judge" in compile_graph(str(path), devices=1).models
