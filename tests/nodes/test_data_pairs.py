"""Pairs of responses: what is read, in what order, and what is said of data that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flattened import flattened
from recorded import means
from rlgraph.nodes.data.pairs import load_pairs, pairs
from rlgraph.nodes.data.prompts import examples
from rlgraph.nodes.support.data_file import DataError
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer

examples, pairs = flattened(examples), flattened(pairs)

ROWS = [
    {"question": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1) + "1" * (i % 3)}
    for i in range(7)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def context(position: int = 0) -> Context:
    return Context(node="pairs", seed=3, iteration=0, position=position)


def test_a_pair_is_two_rows_of_one_group(tokenizer: Any, file: str) -> None:
    out = pairs(tokenizer, context(), files=[file], batch="all", template="plain")
    assert out.group.tolist() == [pair for pair in range(7) for _ in range(2)]
    assert out.chosen.tolist() == [True, False] * 7
    for side, column in (("chosen", 0), ("rejected", 1)):
        alone = examples(
            tokenizer, context(), files=[file], batch="all", answer=side, template="plain", shuffle=False
        )
        assert alone.tokens.tolist() == out.tokens.tolist()[column::2]
        assert alone.loss_mask.tolist() == out.loss_mask.tolist()[column::2]


def test_batches_go_on_where_the_last_one_ended(tokenizer: Any, file: str) -> None:
    def batch(size: int, position: int) -> list[list[float]]:
        made = pairs(tokenizer, context(position), files=[file], batch=size, template="plain")
        return made.tokens.tolist()

    # the position counts rows, of which a pair has two
    assert batch(2, 0) + batch(3, 4) + batch(4, 10) == batch(9, 0)


def test_pairs_with_a_row_that_is_too_long_are_dropped(tokenizer: Any, file: str) -> None:
    shortest = 4 + 1 + 1  # the tokens of "1+1=", "2" and the end
    data = load_pairs(tokenizer, files=[file], template="plain", max_tokens=shortest)
    assert data.column("number") == [1, 4]
    assert data.overlong == 5
    ctx = context()
    out = pairs(tokenizer, ctx, files=[file], batch="all", template="plain", max_tokens=shortest)
    assert len(out.tokens) == 4 and means(ctx) == {"data/overlong": (5.0, 7)}
    place, tokens = load_pairs(tokenizer, files=[file], template="plain").longest()
    assert (place.rpartition(":")[2], tokens) == ("6", 4 + 2 + 2 + 1)


def test_what_is_wrong_is_said(tokenizer: Any, file: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="raise max_tokens"):
        load_pairs(tokenizer, files=[file], template="plain", max_tokens=2)
    with pytest.raises(DataError, match="worse"):
        load_pairs(tokenizer, files=[file], rejected="worse", template="plain")
