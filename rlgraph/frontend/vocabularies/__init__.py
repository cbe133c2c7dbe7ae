"""Compare the vocabularies of models: by what the graph says, by their files, by their names."""

import json
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from rlgraph.ir.graph import Model
from rlgraph.syntax.source import OPEN, read
from rlgraph.variables import with_values

NAMES = Path(__file__).parent / "vocabularies.yaml"


def share_tokens(model: Model, other: Model) -> tuple[bool, bool]:
    """Return whether tokens of one model are those of another, as far as can be told, and whether the graph
    tells it: where it does not, a machine that has the files of both compares them."""
    is_open = OPEN in (model.path, other.path)
    if is_open or model.path == other.path:
        return True, True
    name = _vocabulary(model)
    other_name = _vocabulary(other)
    are_named = bool(name and other_name)
    says_vocabulary = bool(model.spec.vocabulary or other.spec.vocabulary)
    if not says_vocabulary:
        file = _tokenizer_file(model)
        other_file = _tokenizer_file(other)
        if file.is_file() and other_file.is_file():
            return _same_numbers(_version(file), _version(other_file)), are_named
    if not are_named:
        return True, False
    return name == other_name, True


def _tokenizer_file(model: Model) -> Path:
    return Path(with_values(model.path)) / "tokenizer.json"


def _version(file: Path) -> tuple[Path, int]:
    return file, file.stat().st_mtime_ns


def _vocabulary(model: Model) -> str | None:
    """Return the name of a model's vocabulary: as the graph says, else by the model's own name."""
    return model.spec.vocabulary or _by_name(with_values(model.path))


def _by_name(path: str) -> str | None:
    for name, patterns in _known().items():
        if any(fnmatch(path, pattern) for pattern in patterns):
            return name
    return None


@cache
def _known() -> dict[str, list[str]]:
    known: dict[str, list[str]] = read(NAMES).plain()
    return known


@cache
def _same_numbers(version: tuple[Path, int], other: tuple[Path, int]) -> bool:
    """Return whether two files ``tokenizer.json`` agree on each number that both have.

    With each file comes the time of its last change, so that one that has changed is read anew.
    """
    content = version[0].read_bytes()
    other_content = other[0].read_bytes()
    if content == other_content:
        return True
    tokens = _numbers(content)
    other_tokens = _numbers(other_content)
    shared_numbers = tokens.keys() & other_tokens.keys()
    return all(tokens[number] == other_tokens[number] for number in shared_numbers)


def _numbers(file: bytes) -> dict[int, str]:
    """Return the number of each token -> its text, added tokens among them."""
    content = json.loads(file)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {number: text for text, number in vocabulary.items()}
    else:  # of unigrams: a list of texts with scores
        tokens = {number: entry[0] for number, entry in enumerate(vocabulary)}
    for token in content.get("added_tokens", ()):
        tokens[token["id"]] = token["content"]
    return tokens
