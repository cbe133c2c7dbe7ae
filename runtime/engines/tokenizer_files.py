"""Reads a model's tokenizer, and holds what transformers makes of its files against the files.

From version 5 transformers rebuilds a tokenizer by the class that belongs to the model's type, and takes from
``tokenizer.json`` what that class knows: vocabulary, merges and the tokens that it appends. Its own
normaliser, pre-tokeniser and decoder stand in the place of the file's (transformers#45488, 5.23.0). So the
file decides here::

    what AutoTokenizer returns      is taken where it is the file's in every part
    PreTrainedTokenizerFast         else: it has the file's own parts
    TokenizerError                  where that is not the file's either, naming the parts

Of a directory without ``tokenizer.json`` the vocabulary is compared, and of a SentencePiece model what it
makes of some texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
PARTS = {
    "normalizer": "the normaliser",
    "pre_tokenizer": "the pre-tokeniser",
    "model": "the model (vocabulary and merges)",
    "decoder": "the decoder",
    "post_processor": "the special tokens around a text (post-processor)",
}
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
# parts that leave the ids of a text as they are
WITHOUT_EFFECT = ("trim_offsets",)
ADDS_NOTHING = ("ByteLevel",)
# classes that have nothing of their own: their settings are the file's
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend", "PreTrainedTokenizer")
# what is read of a model besides its configuration and its weights, by the names that tools look for
FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"
# texts on which a SentencePiece model and what was made of it are compared
PROBES = (
    "12 + 3 = 15, isn't it?",
    "  two spaces  lead\n\n\nand lines end\there ",
    "naïve café ＡＢＣ ﬁne 日本語 é́ 🙂",
    "def f(x):\n    return x ** 2  # IT'S",
)


class TokenizerError(ValueError):
    """A tokenizer that transformers makes of a model's files is not the one that the files describe."""


def tokenizer_of(path: str, trusted: bool) -> Any:
    """Return the tokenizer that the files of a model directory or hub name describe.

    Raises:
        TokenizerError: transformers can't be brought to read them as they are.
        OSError, ValueError: they can't be loaded at all.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    except ValueError as error:
        if law := _without_reader(path):
            raise TokenizerError(law) from error
        raise
    if type(tokenizer).__module__.startswith("transformers_modules"):
        return tokenizer  # code of the model's own: it is one of the files
    if file_of(path, TOKENIZER) is None:
        _check_other_files(path, tokenizer)
        return tokenizer
    files = StoredTokenizer(path)
    if [*files.differences(tokenizer)]:
        library, tokenizer = tokenizer, PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
        files.name_special_tokens(tokenizer, library)
        if differing := [*files.differences(tokenizer)]:
            raise TokenizerError(
                f"{path}: transformers reads its tokenizer otherwise than {TOKENIZER} has it: "
                f"{', '.join(differing)}; save the tokenizer anew, with all its files from one version"
            )
    files.add_ends(tokenizer)
    return tokenizer


def is_read_by_class(path: str, trusted: bool, tokenizer: Any) -> bool:
    """Return whether AutoTokenizer returns what ``tokenizer_of`` has returned."""
    from transformers import AutoTokenizer

    return type(AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)) is type(tokenizer)


class StoredTokenizer:
    """What a directory with ``tokenizer.json`` says of its tokenizer."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        file = file_of(path, TOKENIZER)
        if file is None:
            raise FileNotFoundError(f"{path} has no {TOKENIZER}")
        self.backend = Tokenizer.from_file(file)
        self.sections: dict[str, Any] = json.loads(self.backend.to_str())
        self.settings = _json(path, SETTINGS)
        # tokenizer_config.json has the last word of the names that both files have
        former = _json(path, "special_tokens_map.json")
        self.named_tokens = {**former, **self.settings}
        self.texts = {*_contents(former), *_contents(self.settings)}
        self.appended: dict[str, int] = _json(path, "added_tokens.json")

    def differences(self, tokenizer: Any) -> Iterator[str]:
        """Yield in which parts a tokenizer is not the one of the files."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            yield f"{type(tokenizer).__name__} does not use it"
            return
        own_parts = json.loads(backend.to_str())
        for name, words in PARTS.items():
            if _meaning(name, self.sections[name]) != _meaning(name, own_parts[name]):
                yield words
        yield from self._added(tokenizer)
        for name in NAMED:
            if name in self.named_tokens and _content(self.named_tokens[name]) != getattr(tokenizer, name):
                yield f"{name} ({getattr(tokenizer, name)} for {_content(self.named_tokens[name])})"

    def _added(self, tokenizer: Any) -> Iterator[str]:
        """Yield which added tokens differ in their ids or in how they are looked for, or are too many."""
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        listed = {token["id"]: [token] for token in self.sections["added_tokens"]}
        for number, token in self.settings.get("added_tokens_decoder", {}).items():
            listed.setdefault(int(number), []).append(token)
        for number, forms in listed.items():
            token = added.get(number)
            if token is None or all(not _is_same(token, form) for form in forms):
                yield f"the added token {forms[0]['content']!r}, which is {number}"
        for content, number in self.appended.items():
            if tokenizer.convert_tokens_to_ids(content) != number:
                yield f"the added token {content!r}, which is {number}"
        known = self.texts | self.appended.keys()
        for number in sorted(added.keys() - listed.keys()):
            if added[number].content not in known:
                yield f"a token that no file has, {added[number].content!r}"

    def name_special_tokens(self, tokenizer: Any, library: Any) -> None:
        """Give a tokenizer the special tokens that the files name, or else those of its model's class.

        The latter only where the vocabulary has them: GPT-2's files leave its end token to the class.
        """
        for name in NAMED:
            usual = getattr(library, name, None)
            if name in self.named_tokens:
                setattr(tokenizer, name, _content(self.named_tokens[name]))
            elif usual is not None and self.backend.token_to_id(usual) is not None:
                setattr(tokenizer, name, usual)

    def add_ends(self, tokenizer: Any) -> None:
        """Begin and end a text by the tokens that tokenizer_config.json asks for.

        transformers 5 drops ``add_bos_token`` and ``add_eos_token`` where there is a ``tokenizer.json``;
        before it the classes of a model's type obeyed them, and the plain ones did not.
        """
        if str(self.settings.get("tokenizer_class")) in PLAIN:
            return
        for name, side in (("bos_token", 0), ("eos_token", -1)):
            end = getattr(tokenizer, f"{name}_id")
            asked = self.settings.get(f"add_{name}") is True and end is not None
            if asked and tokenizer("a")["input_ids"][side] != end:
                setattr(tokenizer, f"add_{name}", True)


def file_of(path: str, name: str) -> str | None:
    """Return where a file of a model directory or hub name lies, or None where there is none."""
    from transformers.utils import cached_file

    file: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return file


def copy_files(path: str, directory: Path) -> None:
    """Copy all that is read of a model but configuration and weights, byte for byte, and remove what else of
    these names is in ``directory``."""
    config = file_of(path, "config.json")
    assert config is not None
    source = Path(config).parent
    for there in [*directory.iterdir()]:
        if there.is_file() and _is_copied(there.name):
            there.unlink()
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_copied(file.name):
            shutil.copyfile(file, directory / file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, directory / TEMPLATES, dirs_exist_ok=True)


def _is_copied(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILES)


def _json(path: str, name: str) -> dict[str, Any]:
    file = file_of(path, name)
    return dict(json.loads(Path(file).read_text(encoding="utf-8"))) if file else {}


def _content(token: Any) -> str | None:
    """Return the text of a token, which files have alone or with its flags."""
    return str(token["content"]) if isinstance(token, Mapping) else token


def _contents(named: Any) -> Iterator[str]:
    """Yield every text below what the files say of special tokens."""
    if isinstance(named, str):
        yield named
    elif isinstance(named, Mapping):
        for value in named.values():
            yield from _contents(value)
    elif isinstance(named, list):
        for value in named:
            yield from _contents(value)


def _is_same(token: Any, form: Mapping[str, Any] | str) -> bool:
    if isinstance(form, str):
        return bool(token.content == form)
    flags = all(getattr(token, flag) == form.get(flag, getattr(token, flag)) for flag in FLAGS)
    return flags and token.content == form["content"]


def _meaning(name: str, part: Any) -> Any:
    """Return a part of a tokenizer without what has no effect on ids, so that equal parts are equal."""
    if name == "post_processor" and _adds_nothing(part):
        return None
    if isinstance(part, dict):
        kept = {key: value for key, value in part.items() if value not in (None, "")}
        return {key: _meaning("", value) for key, value in kept.items() if key not in WITHOUT_EFFECT}
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return [_meaning("", one) for one in part]
    return part


def _adds_nothing(processor: Any) -> bool:
    """Return whether a post-processor leaves the ids of one text as they are."""
    if processor is None or processor["type"] in ADDS_NOTHING:
        return True
    if processor["type"] == "Sequence":
        return all(map(_adds_nothing, processor["processors"]))
    return processor["type"] == "TemplateProcessing" and all("Sequence" in one for one in processor["single"])


def _check_other_files(path: str, tokenizer: Any) -> None:
    """Check a tokenizer against the files of a directory without ``tokenizer.json`` (TokenizerError)."""
    vocabulary = tokenizer.get_vocab()
    ids: dict[str, int] = {}
    if words := _json(path, "vocab.json"):
        ids = {word: number for word, number in words.items() if isinstance(number, int)}
    elif listed := file_of(path, "vocab.txt"):
        lines = Path(listed).read_text(encoding="utf-8").splitlines()
        ids = {line: number for number, line in enumerate(lines)}
    wrong = [word for word, number in ids.items() if vocabulary.get(word) != number]
    if wrong:
        law = f"{path}: {len(wrong)} tokens have other ids than in its vocabulary file, as {wrong[0]!r}"
        raise TokenizerError(f"{law}; give the model a {TOKENIZER}")
    for name in _models(path):
        _check_sentencepiece(path, name, tokenizer)


def _models(path: str) -> list[str]:
    """Return the SentencePiece or tiktoken models of a directory."""
    config = file_of(path, "config.json")
    names = [file.name for file in Path(config).parent.glob("*")] if config else []
    patterns = ("tokenizer.model", "spiece.model", "sentencepiece*.model", "tiktoken.model", "*.tiktoken")
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _check_sentencepiece(path: str, name: str, tokenizer: Any) -> None:
    if "tiktoken" in name or not find_spec("sentencepiece"):
        law = f"{path}: its tokenizer is {name} alone, which does not say how a text is split into words"
        raise TokenizerError(f"{law}; give the model a {TOKENIZER}")
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=file_of(path, name))
    for text in PROBES:
        wanted, pieces = processor.encode(text), tokenizer(text, add_special_tokens=False)["input_ids"]
        if wanted != pieces:
            law = f"{path}: of {text!r} its {name} makes {wanted[:4]}..., and transformers {pieces[:4]}..."
            raise TokenizerError(
                f"{law}; give the model a {TOKENIZER}, made by the version that it came with"
            )


def _without_reader(path: str) -> str:
    """Return that the only tokenizer of a directory needs a package that is not installed, or nothing."""
    if file_of(path, TOKENIZER):
        return ""
    for name in _models(path):
        package = "tiktoken" if "tiktoken" in name else "sentencepiece"
        if not find_spec(package):
            law = f"{path}: its tokenizer is {name} alone, and the package {package} is not installed"
            return f"{law}; install it, or give the model a {TOKENIZER}"
    return ""
