"""What transformers 5 makes of a model's tokenizer files, where a good guess misses it (tried on 5.23.0)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytestmark = pytest.mark.nightly


def saved(folder: Path, kind: str, **settings: object) -> Tokenizer:
    """A tokenizer of one token per character, whose vocabulary has a space."""
    characters = {token: number for number, token in enumerate(["<s>", "</s>", *"12+= ?"])}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    named = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return tokenizer


def test_a_tokenizer_is_rebuilt_by_the_models_type_and_loses_what_its_class_does_not_know(
    tmp_path: Path,
) -> None:
    tokenizer = saved(tmp_path, "qwen2", tokenizer_class="TokenizersBackend")
    rebuilt = AutoTokenizer.from_pretrained(tmp_path)
    assert type(rebuilt).__name__ == "Qwen2Tokenizer"
    assert rebuilt.decode(rebuilt("1 + 2= ?")["input_ids"]) != "1 + 2= ?"
    assert "<|endoftext|>" in rebuilt.get_vocab() and "<|endoftext|>" not in tokenizer.get_vocab()
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert plain("1 + 2= ?")["input_ids"] == tokenizer.encode("1 + 2= ?").ids


def test_add_bos_token_is_dropped_beside_a_tokenizer_json(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v3", tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("1")["input_ids"][0] != tokenizer.bos_token_id
    tokenizer.add_bos_token = True
    assert tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id


def test_a_folder_without_a_configuration_is_read_as_its_files_say(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, "qwen2", tokenizer_class="TokenizersBackend")
    (tmp_path / "config.json").unlink()
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found("1 + 2= ?")["input_ids"] == tokenizer.encode("1 + 2= ?").ids
