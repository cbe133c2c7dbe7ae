"""What transformers 5 does with a model's weights, where a good guess misses it (tried on 5.23.0)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

pytestmark = pytest.mark.nightly
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}


def tiny(kind: str, **more: object) -> AutoConfig:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoConfig.for_model(kind, **{**TINY, **heads, "pad_token_id": 0, **more})


def test_parameters_that_are_drawn_by_size_are_not_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("diffllama"))
    off = {name.rpartition(".")[2] for name, p in model.named_parameters() if not p.is_meta}
    assert off == {"lambda_q1", "lambda_q2", "lambda_k1", "lambda_k2"}


def test_the_padding_row_of_youtus_embeddings_is_zero_whatever_its_file_says(tmp_path: Path) -> None:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    model = AutoModelForCausalLM.from_config(tiny("youtu", **latent, v_head_dim=8, head_dim=4))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1.0
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.get_input_embeddings().weight[0].abs().max() == 0


def test_a_configuration_is_written_without_rope_theta_at_its_top(tmp_path: Path) -> None:
    config = tiny("llama", rope_theta=500000.0)
    config.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert '"rope_parameters"' in written and '\n  "rope_theta"' not in written


def test_generation_settings_that_do_not_go_together_keep_a_model_from_being_written(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            model.save_pretrained(tmp_path)


def test_ministral_3_takes_no_base_from_the_top_of_its_file(tmp_path: Path) -> None:
    fields = AutoConfig.for_model("ministral3").to_dict()
    fields.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_theta": 12345.0}))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1000000.0


def test_the_size_of_deepseeks_heads_is_that_of_their_position_embeddings(tmp_path: Path) -> None:
    fields = AutoConfig.for_model("deepseek_v2").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields | {"head_dim": 128}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.head_dim == config.qk_rope_head_dim == 64


PACKED = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "initializer_range": 0.2}
PACKED |= {"vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 128}
EXPERTS = {"num_experts_per_tok": 2, "sliding_window": 4}


def drawn(kind: str, **more: object) -> Any:
    """A small model of a family, with weights that a mistake shows in."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny(kind, **PACKED, **more), dtype=torch.float32)


def scores(model: Any, *rows: torch.Tensor, **options: object) -> torch.Tensor:
    """Log-probs ``[tokens, vocabulary]`` of rows laid end to end, kept apart by their positions alone."""
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    logits = model(input_ids=torch.cat(rows, 1), position_ids=places, **options).logits
    return torch.as_tensor(logits.log_softmax(-1)[0].detach())


def packing_gap(model: Any, **options: object) -> float:
    """The most by which a packed row is scored otherwise than alone."""
    rows = torch.randint(3, 64, (1, 11)), torch.randint(3, 64, (1, 16))
    alone = torch.cat([scores(model, row, use_cache=False) for row in rows])
    return float((scores(model, *rows, **options) - alone).abs().max())


@pytest.mark.parametrize(
    ("kind", "more", "leaks"),
    [
        ("qwen3", {}, False),
        ("gpt_oss", {"num_local_experts": 4, **EXPERTS}, True),
        ("afmoe", {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}, True),
    ],
)
def test_positions_alone_keep_packed_rows_apart_in_some_families(
    kind: str, more: dict[str, object], leaks: bool
) -> None:
    gap = packing_gap(drawn(kind, **more).eval(), use_cache=False)
    assert gap > 0.1 if leaks else gap < 1e-3


@pytest.mark.filterwarnings("ignore")
def test_packed_rows_see_each_other_where_a_cache_is_made_and_checkpointing_makes_none() -> None:
    """Log-probs of the old policy and of the new one would differ at equal weights; scoring.py has none."""
    model, apart = drawn("qwen3"), set()
    for training in (False, True):
        for checkpointing in (False, True):
            model.train(training)
            model.gradient_checkpointing_disable()
            if checkpointing:
                model.gradient_checkpointing_enable()
            assert packing_gap(model, use_cache=False) < 1e-4
            gap = packing_gap(model)
            assert gap < 1e-4 or gap > 0.5
            apart |= {(training, checkpointing)} if gap < 1e-4 else set()
    assert apart == {(True, True)}


@pytest.mark.parametrize(("kind", "shifts"), [("llama", False), ("qwen3", False), ("hunyuan_v1_dense", True)])
def test_a_row_behind_padding_needs_positions_in_a_rotary_family_with_norms_behind_the_rotation(
    kind: str, shifts: bool
) -> None:
    model = drawn(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are all ones before training
                parameter.add_(0.3 * torch.randn_like(parameter))
    row, padding = torch.randint(3, 64, (1, 12)), torch.zeros(1, 9, dtype=torch.int64)
    mask = torch.cat([padding, torch.ones_like(row)], 1)
    padded = {"input_ids": torch.cat([padding, row], 1), "attention_mask": mask, "use_cache": False}
    alone = scores(model, row, use_cache=False)

    def gap(**more: torch.Tensor) -> float:
        logits = model(**padded, **more).logits[0, -12:].log_softmax(-1)
        return float((logits - alone).abs().max().detach())

    assert gap(position_ids=(mask.cumsum(1) - 1).clamp(min=0)) < 1e-3
    assert gap() > 0.02 if shifts else gap() < 1e-3
