"""A tool that searches a corpus of texts on this machine, by BM25.

Robertson and Zaragoza 2009, doi 10.1561/1500000019; by bm25s (arXiv 2407.03618).
"""

import functools
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from rlgraph.errors import shortened
from rlgraph.nodes.support.data_file import DataError, changed, read_rows
from rlgraph.nodes.support.row_field import given
from rlgraph.ops import File
from rlgraph.ops.tools import before_run

WORD = re.compile(r"\w+")


def _read_all(*, corpus: str, column: str, top: int) -> None:
    """Read a corpus before a run, so that a bad row is not found by the first call."""
    deque(_texts(corpus, column), maxlen=0)


@before_run(_read_all)
def search(query: str, *, corpus: File, column: str = "text", top: int = 3) -> str:
    """Search a corpus for the passages nearest to some words.

    Args:
        query: the words to look for.

    Attributes:
        corpus: a file with one text per row, in a format that data.prompts reads; each process indexes it
            once, for BM25.
        column: the column that holds the text.
        top: how many passages to return, best first.

    Example:
        tools: {search: {kind: search, corpus: wiki.jsonl, top: 3}}
    """
    index = _index(corpus, column, changed(corpus))
    passages = index.best(_words(query), top)
    if not passages:
        return "nothing was found"
    return "\n".join(f"[{place}] {text}" for place, text in enumerate(passages, 1))


class Index:
    """A corpus and the BM25 weights of its words."""

    def __init__(self, texts: list[str]) -> None:
        import bm25s

        self.texts = texts
        self.weights = bm25s.BM25(k1=1.5, b=0.75)
        self.weights.index([_words(text) for text in texts], show_progress=False)

    def best(self, words: list[str], top: int) -> list[str]:
        """Return the texts with the highest scores above 0; of equal ones those that come first."""
        known = [word for word in words if word in self.weights.vocab_dict]
        if not known:
            return []
        scores = self.weights.get_scores(known)
        order = sorted(range(len(self.texts)), key=lambda row: -scores[row])[:top]
        return [self.texts[row] for row in order if scores[row] > 0]


@functools.lru_cache(maxsize=4)
def _index(corpus: str, column: str, written: int) -> Index:
    """Return the index of a file as it was ``written``, in ns."""
    return Index([*_texts(corpus, column)])


def _texts(corpus: str, column: str) -> Iterator[str]:
    """Yield the texts of a corpus.

    Raises:
        DataError: a row has none, or there are no rows.
    """
    empty = True
    for place, row in read_rows(corpus, [column]):
        text = given(place, row, column)
        if not isinstance(text, str):
            law = f"{place}: {column!r} is not text, but {shortened(repr(text), 60)}"
            raise DataError(f"{law}; correct the row, or remove it")
        empty = False
        yield text
    if empty:
        raise DataError(f"{corpus}: no rows; give a corpus that has some")


def _words(text: Any) -> list[str]:
    return WORD.findall(str(text).lower())
