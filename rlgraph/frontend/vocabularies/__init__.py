"""Whether two models give tokens the same numbers: by what the graph says, by their files, by their names."""

import json
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from rlgraph.ir.graph import Model
from rlgraph.syntax.source import OPEN, read
from rlgraph.variables import with_values

NAMES = Path(__file__).parent / "vocabularies.yaml"


def share_tokens(one: Model, other: Model) -> tuple[bool, bool]:
    """Return whether tokens of one model are those of another, as far as can be told, and whether the graph
    tells it: where it does not, a machine that has the files of both compares them."""
    if one.path == other.path or OPEN in (one.path, other.path):
        return True, True
    names = [model.spec.vocabulary or _by_name(with_values(model.path)) for model in (one, other)]
    files = [Path(with_values(model.path)) / "tokenizer.json" for model in (one, other)]
    if all(file.is_file() for file in files) and not (one.spec.vocabulary or other.spec.vocabulary):
        return _alike(*((file, file.stat().st_mtime_ns) for file in files)), all(names)
    return names[0] == names[1] or not all(names), all(names)


def _by_name(path: str) -> str | None:
    fitting = (name for name, models in _known().items() if any(fnmatch(path, like) for like in models))
    return next(fitting, None)


@cache
def _known() -> dict[str, list[str]]:
    known: dict[str, list[str]] = read(NAMES).plain()
    return known


@cache
def _alike(*files: tuple[Path, int]) -> bool:
    """Return whether two files ``tokenizer.json`` agree on each number that both have."""
    one, other = (file.read_bytes() for file, _ in files)
    if one == other:
        return True
    first, second = _numbers(one), _numbers(other)
    return all(second.get(number, token) == token for number, token in first.items())


def _numbers(file: bytes) -> dict[int, str]:
    """Return the number of each token -> its text, added tokens among them."""
    content = json.loads(file)
    vocabulary = content["model"]["vocab"]  # of unigrams a list, with scores
    pairs = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
    )
    added = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
    return {**{number: text for text, number in pairs}, **added}
