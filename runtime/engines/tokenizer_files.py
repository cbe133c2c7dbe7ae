"""Reads a model's tokenizer, and compares what transformers makes of its files with the files.

From version 5 transformers rebuilds a tokenizer by the class that belongs to the model's type, and takes from
``tokenizer.json`` what that class knows: vocabulary, merges and the tokens that it appends. The normaliser,
pre-tokeniser and decoder are those of the class, and not the file's (transformers#45488, 5.23.0). Here the
file decides; the first of these that agrees with it in every section is taken::

    what AutoTokenizer returns
    PreTrainedTokenizerFast         which takes the file's sections as they are
    TokenizerError                  where neither does, naming the sections

Without ``tokenizer.json``, the vocabulary is compared, and what a SentencePiece model makes of some texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SECTIONS = {  # of tokenizer.json, as errors name them
    "normalizer": "the normaliser",
    "pre_tokenizer": "the pre-tokeniser",
    "model": "the model (vocabulary and merges)",
    "decoder": "the decoder",
    "post_processor": "the special tokens around a text (post-processor)",
}
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
WITHOUT_EFFECT = ("trim_offsets",)  # fields that leave the ids of a text as they are
ADDS_NOTHING = ("ByteLevel",)  # post-processors that do
# classes that add no sections or settings to those of the files
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
        law = _missing_package(path)
        if law:
            raise TokenizerError(law) from error
        raise
    if type(tokenizer).__module__.startswith("transformers_modules"):
        return tokenizer  # its code came with the model, and is one of the files
    if file_of(path, TOKENIZER) is None:
        _check_other_files(path, tokenizer)
        return tokenizer
    files = StoredTokenizer(path)
    if any(files.differences(tokenizer)):
        of_class = tokenizer
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
        files.name_special_tokens(tokenizer, of_class)
        differing = list(files.differences(tokenizer))
        if differing:
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
    """The files that describe a tokenizer, in a directory with ``tokenizer.json``.

    Attributes:
        backend: the tokenizer as ``tokenizer.json`` has it.
        sections: the content of that file.
        settings: ``tokenizer_config.json``.
        named_tokens: the special tokens that the files name, by ``bos_token`` and so on.
        texts: every text of a special token in the files.
        appended: the ids of ``added_tokens.json``.
    """

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
        """Yield the sections in which a tokenizer is not that of the files, and its tokens that are not."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            yield f"{type(tokenizer).__name__} does not use it"
            return
        loaded_sections = json.loads(backend.to_str())
        for name, description in SECTIONS.items():
            stored_section = _meaning(name, self.sections[name])
            if stored_section != _meaning(name, loaded_sections[name]):
                yield description
        yield from self._added_differences(tokenizer)
        for name in SPECIAL_TOKENS:
            if name in self.named_tokens:
                stored_token = _content(self.named_tokens[name])
                loaded_token = getattr(tokenizer, name)
                if stored_token != loaded_token:
                    yield f"{name} ({loaded_token} for {stored_token})"

    def _added_differences(self, tokenizer: Any) -> Iterator[str]:
        """Yield the added tokens that differ in their ids or in how they are looked for, or are too many."""
        loaded: dict[int, Any] = tokenizer.added_tokens_decoder
        stored = {token["id"]: [token] for token in self.sections["added_tokens"]}  # id -> in each file
        for token_id, token in self.settings.get("added_tokens_decoder", {}).items():
            stored.setdefault(int(token_id), []).append(token)
        for token_id, forms in stored.items():
            token = loaded.get(token_id)
            is_as_stored = token is not None and any(_is_same(token, form) for form in forms)
            if not is_as_stored:
                yield f"the added token {forms[0]['content']!r}, which is {token_id}"
        for content, token_id in self.appended.items():
            if tokenizer.convert_tokens_to_ids(content) != token_id:
                yield f"the added token {content!r}, which is {token_id}"
        known_texts = self.texts | self.appended.keys()
        for token_id in sorted(loaded.keys() - stored.keys()):
            content = loaded[token_id].content
            if content not in known_texts:
                yield f"a token that no file has, {content!r}"

    def name_special_tokens(self, tokenizer: Any, of_class: Any) -> None:
        """Give a tokenizer the special tokens that the files name, or else those of its model's class.

        The latter only where the vocabulary has them: GPT-2's files leave its end token to the class.
        """
        for name in SPECIAL_TOKENS:
            default = getattr(of_class, name, None)
            if name in self.named_tokens:
                setattr(tokenizer, name, _content(self.named_tokens[name]))
            elif default is not None and self.backend.token_to_id(default) is not None:
                setattr(tokenizer, name, default)

    def add_ends(self, tokenizer: Any) -> None:
        """Begin and end a text by the tokens that tokenizer_config.json asks for.

        transformers 5 drops ``add_bos_token`` and ``add_eos_token`` where there is a ``tokenizer.json``;
        before it the classes of a model's type obeyed them, and the plain ones did not.
        """
        if str(self.settings.get("tokenizer_class")) in PLAIN:
            return
        for name, side in (("bos_token", 0), ("eos_token", -1)):
            token_id = getattr(tokenizer, f"{name}_id")
            is_wanted = self.settings.get(f"add_{name}") is True
            if token_id is None or not is_wanted:
                continue
            if tokenizer("a")["input_ids"][side] != token_id:
                setattr(tokenizer, f"add_{name}", True)


def file_of(path: str, name: str) -> str | None:
    """Return where a file of a model directory or hub name lies, or None where there is none."""
    from transformers.utils import cached_file

    file: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return file


def copy_files(path: str, directory: Path) -> None:
    """Copy the files of a model other than configuration and weights (``FILES``), byte for byte.

    Files of these names that are in ``directory`` already are removed.
    """
    config = file_of(path, "config.json")
    assert config is not None
    source = Path(config).parent
    for earlier in list(directory.iterdir()):
        if earlier.is_file() and _is_copied(earlier.name):
            earlier.unlink()
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_copied(file.name):
            shutil.copyfile(file, directory / file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, directory / TEMPLATES, dirs_exist_ok=True)


def _is_copied(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILES)


def _json(path: str, name: str) -> dict[str, Any]:
    file = file_of(path, name)
    if file is None:
        return {}
    return dict(json.loads(Path(file).read_text(encoding="utf-8")))


def _content(token: Any) -> str | None:
    """Return the text of a token, which files have alone or with its flags."""
    return str(token["content"]) if isinstance(token, Mapping) else token


def _contents(value: Any) -> Iterator[str]:
    """Yield every text within a value of JSON."""
    if isinstance(value, str):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        yield from _contents(item)


def _is_same(token: Any, form: Mapping[str, Any] | str) -> bool:
    """Return whether an added token is as a file has it; a flag that the file leaves out may be either."""
    if isinstance(form, str):
        return bool(token.content == form)
    for flag in FLAGS:
        if flag in form and getattr(token, flag) != form[flag]:
            return False
    return bool(token.content == form["content"])


def _meaning(name: str, section: Any) -> Any:
    """Return a section of a tokenizer without fields that have no effect on ids, for comparisons."""
    if name == "post_processor" and _adds_nothing(section):
        return None
    if isinstance(section, dict):
        fields = {}
        for key, value in section.items():
            if value not in (None, "") and key not in WITHOUT_EFFECT:
                fields[key] = _meaning("", value)
        return fields
    is_list_of_sections = isinstance(section, list) and bool(section) and isinstance(section[0], dict)
    if is_list_of_sections:
        return [_meaning("", item) for item in section]
    return section


def _adds_nothing(processor: Any) -> bool:
    """Return whether a post-processor leaves the ids of one text as they are."""
    if processor is None or processor["type"] in ADDS_NOTHING:
        return True
    if processor["type"] == "Sequence":
        return all(map(_adds_nothing, processor["processors"]))
    if processor["type"] == "TemplateProcessing":
        return all("Sequence" in item for item in processor["single"])
    return False


def _check_other_files(path: str, tokenizer: Any) -> None:
    """Check a tokenizer against the files of a directory without ``tokenizer.json`` (TokenizerError)."""
    loaded = tokenizer.get_vocab()
    differing = [token for token, token_id in _vocabulary(path).items() if loaded.get(token) != token_id]
    if differing:
        law = f"{path}: {len(differing)} tokens have other ids than in its vocabulary file"
        law += f", as {differing[0]!r}"
        raise TokenizerError(f"{law}; give the model a {TOKENIZER}")
    for name in _tokenizer_models(path):
        _check_sentencepiece(path, name, tokenizer)


def _vocabulary(path: str) -> dict[str, int]:
    """Return the ids of a directory's vocabulary file; nothing where it has none."""
    stored = _json(path, "vocab.json")
    if stored:
        return {token: token_id for token, token_id in stored.items() if isinstance(token_id, int)}
    file = file_of(path, "vocab.txt")
    if file is None:
        return {}
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {line: number for number, line in enumerate(lines)}


def _tokenizer_models(path: str) -> list[str]:
    """Return the SentencePiece or tiktoken models of a directory."""
    config = file_of(path, "config.json")
    if config is None:
        return []
    patterns = ("tokenizer.model", "spiece.model", "sentencepiece*.model", "tiktoken.model", "*.tiktoken")
    names = set()
    for file in Path(config).parent.iterdir():
        if any(fnmatch(file.name, pattern) for pattern in patterns):
            names.add(file.name)
    return sorted(names)


def _check_sentencepiece(path: str, name: str, tokenizer: Any) -> None:
    if "tiktoken" in name or not find_spec("sentencepiece"):
        law = f"{path}: its tokenizer is {name} alone, which does not say how a text is split into words"
        raise TokenizerError(f"{law}; give the model a {TOKENIZER}")
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=file_of(path, name))
    for text in PROBES:
        wanted = processor.encode(text)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if wanted != ids:
            law = f"{path}: of {text!r} its {name} makes {wanted[:4]}..., and transformers {ids[:4]}..."
            raise TokenizerError(
                f"{law}; give the model a {TOKENIZER}, made by the version that it came with"
            )


def _missing_package(path: str) -> str:
    """Return that the only tokenizer of a directory needs a package that is not installed, or nothing."""
    if file_of(path, TOKENIZER):
        return ""
    for name in _tokenizer_models(path):
        package = "tiktoken" if "tiktoken" in name else "sentencepiece"
        if not find_spec(package):
            law = f"{path}: its tokenizer is {name} alone, and the package {package} is not installed"
            return f"{law}; install it, or give the model a {TOKENIZER}"
    return ""
