"""Fields of config.json that a graph changes (``models.NAME.config``), and rows that a model can't hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build, expected, family_of, objective, plain, scored
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlgraph.compiler import compile_graph
from rlgraph.costs.model_size import size_of
from rlgraph.errors import GraphError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.model_files import ConfigFileError, ModelFiles, context_of
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.preflight import unfit
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.export import _write
from rlgraph.runtime.run import run_graph

NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
BASE = 100.0  # not the family's own, which would come back where one left it out


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = build(tmp_path, "llama")
    fields = json.loads((path / "config.json").read_text())
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": BASE}
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_the_train_and_the_serve_engine_read_the_changed_config(
    llama: Path, name: str, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(llama, rope_parameters={**LINEAR, "rope_theta": BASE})
    with quiet(), torch.no_grad():
        changed = expected(AutoModelForCausalLM.from_pretrained(llama, config=config).eval())
        assert (changed - expected(plain(llama))).abs().max() > 1e-3
    given = {name: LINEAR, "max_position_embeddings": 256}
    engine = FsdpEngine.of(str(llama), optimizer={"lr": 1e-3}, config=given)
    torch.testing.assert_close(engine.logprobs(**scored()).values, changed, **NEAR)
    serve = TransformersEngine(str(llama), config=given)
    assert serve.context == 256
    serve.load_pretrained()
    ((made,),) = serve.generate([Request([5, 6, 7], [1])], Sampling(8))
    row = Ragged.of([[5, 6, 7, *made.tokens]])
    mask = Ragged.of([[False] * 3 + [True] * len(made.tokens)], torch.bool)
    own = torch.tensor(made.logprobs)
    torch.testing.assert_close(engine.logprobs(row, mask).values[3:], own, rtol=1e-4, atol=1e-4)
    engine.export(str(tmp_path / "exported"))
    with torch.no_grad():
        torch.testing.assert_close(expected(plain(tmp_path / "exported")), changed, **NEAR)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_is_exported_with_it(llama: Path, tmp_path: Path) -> None:
    given = [f"models.policy.path={llama}", f"models.policy.config={json.dumps({'rope_scaling': LINEAR})}"]
    policy = compile_graph("grpo", [*given, "models.ref.config=${models.policy.config}"], 1).models["policy"]
    engine = FsdpEngine.of(str(llama), optimizer={"lr": 1e-3}, config=policy.config)
    engine.save(str(tmp_path / "saved"))
    _write(policy, tmp_path / "saved", tmp_path / "exported")
    with torch.no_grad():
        scores = expected(plain(tmp_path / "exported"))
    torch.testing.assert_close(scores, engine.logprobs(**scored()).values, **NEAR)


@pytest.mark.usefixtures("one_rank")
def test_a_change_of_shapes_that_only_the_files_tell_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, "deepseek_v3")
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight is \[64, 16\], the model's is \[48, 16\]"):
        FsdpEngine.of(str(path), frozen=True, config={"v_head_dim": 4})


def test_the_size_counts_with_it(tmp_path: Path) -> None:
    path = str(build(tmp_path, "mixtral"))
    one, two = (size_of(path, "lm", {"num_experts_per_tok": n, "sliding_window": 7}) for n in (1, 2))
    assert one.parameters == two.parameters
    assert two.multiplied - one.multiplied == 2 * 3 * 32 * 64  # an expert in each of two layers


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("family", "config", "most"),
    [
        ("phi3, longrope", {}, 24),  # what it was first made for
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 12},
            12,
        ),
    ],
)
def test_no_row_changes_the_position_embeddings_of_others(
    tmp_path: Path, family: str, config: dict[str, Any], most: int
) -> None:
    path = build(tmp_path, family)
    engine = FsdpEngine.of(str(path), optimizer={"lr": 1e-3}, config=config)
    fits, longer = ({"tokens": Ragged.of([[3, 4, 5, 6], [*range(2, 2 + n)]])} for n in (most, most + 2))
    for columns in fits, longer:
        mask = [[t > 0 for t in range(n)] for n in columns["tokens"].lengths.tolist()]
        columns["loss_mask"] = Ragged.of(mask, torch.bool)
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            path, config=ModelFiles(str(path), config).config()
        ).eval()
        ids = fits["tokens"][0][None]
        log_p = torch.log_softmax(model(ids).logits[0, :-1], -1)
    alone = log_p.gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(engine.logprobs(**fits)[0][1:], alone, **NEAR)
    law = (
        rf"^{family_of(family)}: a row has {most + 2} tokens, and with more than {most} .*; keep rows within"
    )
    with pytest.raises(ValueError, match=law):
        engine.logprobs(**longer)
    with pytest.raises(ValueError, match=law):
        engine.update(longer, objective, torch.arange(2), 2)
    serve = TransformersEngine(str(path), config=config)
    serve.load_pretrained()
    with pytest.raises(ValueError, match=f"more than the model's context of {most}"):
        serve.generate([Request([5, 6, 7], [1])], Sampling(most - 2))


def test_other_position_embeddings_take_the_limit_away(tmp_path: Path) -> None:
    path = str(build(tmp_path, "phi3, longrope"))
    assert context_of(ModelFiles(path, {"rope_scaling": {"rope_type": "default"}}).config()) == 64
    assert context_of(ModelFiles(str(build(tmp_path, "gemma3_text"))).config()) == 64


@pytest.mark.parametrize(
    ("family", "changed", "fault"),
    [
        ("mistral, windows", {}, r"^mistral: SGLang sees all tokens .* windows of 4; .*null}, or keep rows"),
        ("mistral, windows", {"sliding_window": None}, ""),
        ("mistral, windows", {"max_position_embeddings": 4}, ""),
        ("mistral", {}, ""),
        ("gemma3_text", {}, ""),
        ("qwen2", {}, ""),
    ],
)
def test_windows_that_sglang_would_leave_out_are_refused(
    tmp_path: Path, family: str, changed: dict[str, Any], fault: str
) -> None:
    law = unfit(ModelFiles(str(build(tmp_path, family)), changed).config())
    assert re.search(fault, law) if fault else not law


@pytest.mark.parametrize(
    ("family", "changed", "fault"),
    [
        ("llama", {"max_position_embedings": 9}, "no field max_position_embedings; did you mean `max_pos"),
        ("llama", {"max_position_embeddings": "many"}, "expected int, got str"),
        ("llama", {"rope_theta": 5e5}, r"rope_theta is one of rope_parameters: {rope_theta: 500000.0}"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys .* {'factor'}"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yearn"}},
            "no rope_type yearn; .* linear, ",
        ),
        ("qwen3", {"sliding_window": 4}, "sliding_window: 4 has no effect beside the model's other fields"),
        ("gemma3_text", {"rope_scaling": LINEAR}, "each kind of layer: full_attention, sliding_attention"),
    ],
)
def test_a_field_that_changes_nothing_is_refused(
    tmp_path: Path, family: str, changed: dict[str, Any], fault: str
) -> None:
    path = build(tmp_path, family)
    given = [f"models.policy.path={path}", f"models.policy.config={json.dumps(changed)}"]
    given += [f"models.ref.config={json.dumps(changed)}", "prompts.files=[none.jsonl]"]
    with pytest.raises(GraphError, match=rf"models\.policy\.config: {family}: .*{fault}") as caught:
        run_graph("grpo", given, 1, inline=True)
    assert "leave the field out" in str(caught.value)


def test_position_embeddings_of_one_kind_of_layer_leave_the_others(tmp_path: Path) -> None:
    path = build(tmp_path, "gemma3_text")
    fields = json.loads((path / "config.json").read_text())
    for kind in fields["rope_parameters"].values():
        kind["rope_theta"] = BASE  # not the family's own
    (path / "config.json").write_text(json.dumps(fields))
    found = ModelFiles(str(path), {"rope_parameters": {"full_attention": LINEAR}}).config().rope_parameters
    assert found["full_attention"] == {**LINEAR, "rope_theta": BASE}
    assert found["sliding_attention"] == fields["rope_parameters"]["sliding_attention"]


def test_a_server_is_asked_for_as_many_experts_as_the_config_says(tmp_path: Path) -> None:
    path = str(build(tmp_path, "qwen3_moe"))
    for k in (1, 3):
        engine = SimpleNamespace(path=path, files=ModelFiles(path, {"num_experts_per_tok": k}))
        assert SglangEngine.mixture.func(engine).k == k


@pytest.mark.parametrize(
    ("graph", "family", "laws"),
    [
        (
            "grpo",
            "qwen3_next",
            ("policy: qwen3_next: the embedded engine runs", "with sglang"),
        ),
        (
            "ppo",
            "olmo2",
            ("models.critic: olmo2: transformers has no ModelForTokenClassification", "choose a"),
        ),
    ],
)
def test_a_family_is_refused_by_name_before_a_worker_starts(
    tmp_path: Path, graph: str, family: str, laws: tuple[str, ...]
) -> None:
    path = build(tmp_path, family)
    with pytest.raises(GraphError) as caught:
        run_graph(graph, (f"models.policy.path={path}", "prompts.files=[none.jsonl]"), 1, inline=True)
    assert all(law in str(caught.value) for law in laws)


# fields of config.json, changed by hand as old or foreign files have them, that the class of a model forgets
ROPE = {"rope_type": "default", "rope_theta": BASE}
FORGOTTEN: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "ministral3",
        {"rope_theta": 12345.0},
        "rope_theta: 12345.0, of which .* have 1000000.0",
        {"rope_parameters": ROPE},
    ),
    ("deepseek_v2", {"head_dim": 128}, "head_dim: 128, which DeepseekV2Config reads as 64", {"head_dim": 64}),
    (
        "olmo3",
        {"partial_rotary_factor": 0.25},
        "partial_rotary_factor: 0.25, of which .* have nothing",
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    ),
]


def config_file(folder: Path, kind: str, fields: dict[str, Any], left_out: str = "rope_parameters") -> Path:
    """Write the ``config.json`` of a family with other fields, and return its folder."""
    stored = AutoConfig.for_model(kind).to_dict()
    stored.pop(left_out)
    (folder / "config.json").write_text(json.dumps(stored | fields))
    return folder


@pytest.mark.parametrize(("kind", "fields", "fault", "remedy"), FORGOTTEN)
def test_a_field_of_the_file_that_the_class_forgets_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, Any], fault: str, remedy: dict[str, Any]
) -> None:
    path = str(config_file(tmp_path, kind, fields))
    with pytest.raises(ConfigFileError, match=f"config.json says {fault}; set models.NAME.config."):
        ModelFiles(path).config()
    config = ModelFiles(path, remedy).config()
    ((name, value),) = remedy.items()
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("phi3", {"rope_theta": 12345.0, "partial_rotary_factor": 0.5}),
        ("qwen2", {"sliding_window": 131072, "use_sliding_window": False}),
        ("gemma3_text", {"rope_theta": 5e6, "rope_local_base_freq": 1e5}),
        ("gpt2", {"n_embd": 64}),
    ],
)
def test_former_names_and_windows_that_are_off_are_no_fault(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    folder = config_file(
        tmp_path, kind, fields, "transformers_version" if kind == "gpt2" else "rope_parameters"
    )
    config = ModelFiles(str(folder)).config()
    assert "rope_theta" not in fields or str(fields["rope_theta"]) in str(config.rope_parameters)


def test_a_part_of_a_configuration_is_held_to_the_file_too(tmp_path: Path) -> None:
    fields = AutoConfig.for_model("mistral3", text_config={"model_type": "ministral3"}).to_dict()
    fields["text_config"].pop("rope_parameters")
    fields["text_config"]["rope_theta"] = 12345.0
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigFileError, match=r"text_config\.rope_theta: 12345\.0"):
        ModelFiles(str(tmp_path)).config()


def test_a_run_refuses_the_file_before_it_starts(tmp_path: Path) -> None:
    folder = config_file(tmp_path, "ministral3", {"rope_theta": 12345.0})
    (folder / "model.safetensors").touch()
    with pytest.raises(GraphError, match=r"config\.json says rope_theta: 12345\.0") as caught:
        run_graph("grpo", [f"models.policy.path={folder}", "prompts.files=[none.jsonl]"], 1, inline=True)
    assert "set models.policy.config.rope_parameters" in str(caught.value)


@pytest.mark.nightly
def test_the_configurations_of_every_family_are_read_as_they_are_written(tmp_path: Path) -> None:
    read = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            stored = AutoConfig.for_model(kind).to_json_string(use_diff=False)
        except (
            StrictDataclassClassValidationError
        ):  # such as a draft model, which wants another's configuration
            continue
        (tmp_path / "config.json").write_text(stored)
        ModelFiles(str(tmp_path)).config()
        read += 1
    assert read > 150
