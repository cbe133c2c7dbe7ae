"""What transformers 5 does with a model's weights, where a good guess misses it (tried on 5.23.0)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

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
