"""The tokenizer is what a model's files describe, whatever transformers makes of them; so is its export."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoTokenizer

from rlgraph.runtime.demo import make_tokenizer, model_config, write_model
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sglang.options import tokenizer_option
from rlgraph.runtime.engines.tokenizer_files import TokenizerError
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

TEXTS = [
    "Hello world, it's 12 + 34 = 46.",
    "Let us go   home! naïve café",
    "def f(x):\n    return x ** 2",
] * 3
PROBES = ["12 + 3= ?", "  two  spaces\n\n\nIT'S 123456 ＡＢＣ", "a<|im_end|> b <|endoftext|>", "x\u0301 日本"]
END, START = "<|im_end|>", "<|endoftext|>"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Split = pre_tokenizers.PreTokenizer


def by_words(numbers: str) -> Split:
    """Split as Qwen and Llama 3 do, which differ in how many digits make a word."""
    pattern = Regex(WORDS.replace("NUMBERS", numbers) + REST)
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), levels])


def bpe(split: Split, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = split, normalizer
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=[START, END], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFKC(), decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", START, END], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def spaces() -> Tokenizer:
    """Write spaces as Gemma and Llama 2 do."""
    tokenizer = bpe(pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return tokenizer


NAMES = {"eos_token": END, "bos_token": START}
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
# name -> the file, the model's type, tokenizer_config.json
CASES: dict[str, tuple[Callable[[], Tokenizer], str, dict[str, Any]]] = {
    "the demo's": (
        lambda: make_tokenizer().backend_tokenizer,
        "qwen2",
        {"tokenizer_class": "TokenizersBackend", "eos_token": "<eos>", "bos_token": "<bos>"},
    ),
    "Qwen's": (
        lambda: bpe(by_words(r"\p{N}"), normalizers.NFC()),
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer", **NAMES, "bos_token": None, "pad_token": START},
    ),
    "Qwen's class, Llama's words": (
        lambda: bpe(by_words(r"\p{N}{1,3}")),
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer", **NAMES},
    ),
    "Qwen's type, spaces written": (spaces, "qwen3", {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "Llama 3's": (
        lambda: bpe(by_words(r"\p{N}{1,3}")),
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES},
    ),
    "GPT-2's class, single digits": (
        lambda: bpe(DIGITS),
        "llama",
        {"tokenizer_class": "GPT2Tokenizer", **NAMES},
    ),
    "GPT-2's without settings": (lambda: bpe(GPT2), "gpt2", {}),
    "Llama's class, bytes": (
        lambda: bpe(by_words(r"\p{N}{1,3}")),
        "llama",
        {"tokenizer_class": "LlamaTokenizerFast", **NAMES},
    ),
    "Gemma's class, spaces": (spaces, "gemma3_text", {"tokenizer_class": "GemmaTokenizer", **NAMES}),
    "a unigram of Gemma's type": (unigram, "gemma2", {"tokenizer_class": "GemmaTokenizer", **NAMES}),
    "a unigram of Llama's type": (unigram, "llama", {"tokenizer_class": "LlamaTokenizer", **NAMES}),
    "bytes of Mistral's type": (
        lambda: bpe(DIGITS),
        "mistral",
        {"tokenizer_class": "LlamaTokenizer", **NAMES},
    ),
    "an unknown class": (lambda: bpe(DIGITS), "qwen3", {"tokenizer_class": "OwnTokenizer", **NAMES}),
    "without a class": (lambda: bpe(DIGITS), "phi3", {**NAMES}),
}


def written(folder: Path, tokenizer: Tokenizer, kind: str, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids(tokenizer: Any) -> list[list[int]]:
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PROBES]


@pytest.mark.parametrize("case", CASES)
def test_a_text_has_the_tokens_of_the_file(tmp_path: Path, case: str) -> None:
    make, kind, settings = CASES[case]
    tokenizer = make()
    found = ModelFiles(str(written(tmp_path, tokenizer, kind, settings))).tokenizer()
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBES]
    assert ids(found) == wanted
    assert [found.decode(row) for row in wanted] == [
        tokenizer.decode(row, skip_special_tokens=False) for row in wanted
    ]
    assert found.get_vocab() == tokenizer.get_vocab()  # nothing is appended
    for name in ("eos_token", "bos_token", "pad_token"):
        if name in settings:
            assert getattr(found, name) == settings[name]


def test_the_class_of_a_type_gives_the_special_tokens_that_files_leave_to_it(tmp_path: Path) -> None:
    found = ModelFiles(str(written(tmp_path / "same", bpe(GPT2), "gpt2", {}))).tokenizer()
    other = ModelFiles(str(written(tmp_path / "other", bpe(DIGITS), "gpt2", {}))).tokenizer()
    assert found.eos_token == other.eos_token == START
    demo = written(tmp_path / "demo", make_tokenizer().backend_tokenizer, "qwen2", {"eos_token": "<eos>"})
    assert ModelFiles(str(demo)).tokenizer().pad_token is None  # Qwen's is not in this vocabulary


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, False),
    ],
)
def test_a_text_begins_as_tokenizer_config_says(
    tmp_path: Path, settings: dict[str, Any], begins: bool
) -> None:
    tokenizer = bpe(by_words(r"\p{N}{1,3}"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # as DeepSeek V3 has it
    found = ModelFiles(str(written(tmp_path, tokenizer, "deepseek_v3", {**NAMES, **settings}))).tokenizer()
    first, *_ = found("Hello")["input_ids"]
    assert (first == found.bos_token_id) == begins


def test_a_token_with_another_id_than_the_file_says_is_refused(tmp_path: Path) -> None:
    said = {"500": {"content": "<|tool|>", "special": True}}
    path = written(tmp_path, bpe(GPT2), "qwen2", {**NAMES, "added_tokens_decoder": said})
    with pytest.raises(
        TokenizerError, match=r"the added token '<\|tool\|>', which is 500; save the tokenizer"
    ):
        ModelFiles(str(path)).tokenizer()


def test_added_tokens_are_looked_for_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = bpe(GPT2)
    tokenizer.add_tokens([AddedToken("<|tool|>", lstrip=True, rstrip=True, normalized=False)])
    found = ModelFiles(str(written(tmp_path, tokenizer, "qwen2", NAMES))).tokenizer()
    text = "a  <|tool|>  b"
    assert found(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).ids


def test_a_vocabulary_without_a_tokenizer_file_is_held_to_its_ids(tmp_path: Path) -> None:
    tokenizer = bpe(GPT2)
    path = written(tmp_path, tokenizer, "gpt2", {**NAMES, "tokenizer_class": "GPT2Tokenizer"})
    tokenizer.model.save(str(path))
    (path / "tokenizer.json").unlink()
    found = ModelFiles(str(path)).tokenizer()
    assert ids(found)[:2] == [tokenizer.encode(text).ids for text in PROBES[:2]]
    words = json.loads((path / "vocab.json").read_text())
    (path / "vocab.json").write_text(json.dumps({**words, "Hello": 7777}))
    assert ModelFiles(str(path)).tokenizer().get_vocab()["Hello"] == 7777


def test_a_sentencepiece_model_alone_names_the_package_that_is_lacking(tmp_path: Path) -> None:
    if find_spec("sentencepiece"):
        pytest.skip("sentencepiece is installed")
    path = written(tmp_path, bpe(GPT2), "gemma2", {"tokenizer_class": "GemmaTokenizer", **NAMES})
    (path / "tokenizer.json").rename(path / "tokenizer.model")
    with pytest.raises(
        TokenizerError, match="the package sentencepiece is not installed; install it, or give"
    ):
        ModelFiles(str(path)).tokenizer()


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A demo's model with files that transformers would write otherwise, or not at all."""
    tokenizer = make_tokenizer()
    write_model(tmp_path / "model", model_config(tokenizer), tokenizer, 0)
    folder = tmp_path / "model"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature":0.6,"top_p":0.9}')
    (folder / "special_tokens_map.json").write_text('{"eos_token":"<eos>"}\n')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag {{ messages }}")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"rope_theta": 5e5, "torch_dtype": "float32", "rope_scaling": None, "own": {"a": 1}}
    for name in ("rope_parameters", "dtype"):
        fields.pop(name)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.usefixtures("one_rank")
def test_an_export_has_the_files_of_its_source(demo: Path, tmp_path: Path) -> None:
    FsdpEngine.of(str(demo), optimizer={"lr": 1e-3}).export(str(tmp_path / "out"))
    there = {file.relative_to(demo): file.read_bytes() for file in demo.rglob("*") if file.is_file()}
    made = {
        file.relative_to(tmp_path / "out"): file.read_bytes()
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    assert there.keys() == made.keys()
    differing = {str(name) for name, content in made.items() if content != there[name]}
    assert differing <= {"config.json", "model.safetensors"}
    assert json.loads(made[Path("config.json")]) == json.loads(there[Path("config.json")])


@pytest.mark.usefixtures("one_rank")
def test_an_exports_configuration_has_what_the_run_changed_and_nothing_else(
    demo: Path, tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    changed = {"rope_parameters": rope, "max_position_embeddings": 128}
    FsdpEngine.of(str(demo), optimizer={"lr": 1e-3}, config=changed).export(str(tmp_path / "out"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (demo, tmp_path / "out"))
    assert after.pop("rope_parameters") == {**rope, "rope_theta": 5e5}
    assert after.pop("max_position_embeddings") == 128
    for name in ("rope_theta", "rope_scaling", "max_position_embeddings"):
        before.pop(name)
    assert after == before


def test_a_serve_engine_reads_what_the_data_was_written_with(demo: Path, tmp_path: Path) -> None:
    files = ModelFiles(str(demo))
    ours = files.tokenizer()
    assert TransformersEngine(str(demo)).tokenizer("12 + 3= ?")["input_ids"] == ours("12 + 3= ?")["input_ids"]
    option = tokenizer_option(files, ours, tmp_path / "logs")
    # as SGLang does: AutoTokenizer in the folder that it is given
    other = AutoTokenizer.from_pretrained(option["tokenizer_path"])
    assert other("12 + 3= ?")["input_ids"] == ours("12 + 3= ?")["input_ids"]
    plain = written(tmp_path / "plain", bpe(by_words(r"\p{N}"), normalizers.NFC()), "qwen2", NAMES)
    assert tokenizer_option(ModelFiles(str(plain)), ModelFiles(str(plain)).tokenizer(), tmp_path) == {}
