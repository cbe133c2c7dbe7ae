"""A data source of pairs: a question with a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from rlgraph.engines import Context, Tokenizer
from rlgraph.nodes.data import Batch, Files, pick
from rlgraph.nodes.dataset import DataError, ExampleSet, Template, load_examples
from rlgraph.nodes.ragged import Ragged
from rlgraph.op import op
from rlgraph.types import boolean, int64, samples, tokens

Sequences = tuple[list[int], list[int]]  # prompt; response with its end token


class Pairs(NamedTuple):
    """What ``data.pairs`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    chosen: boolean[samples]
    group: int64[samples]


@dataclass(frozen=True)
class PairSet:
    """All pairs of a source; item i of each field speaks of one pair."""

    places: Sequence[str]  # FILE:N
    chosen: Sequence[Sequences]
    rejected: Sequence[Sequences]
    overlong: int = 0  # pairs dropped for their length

    def longest(self) -> tuple[str, int]:
        """Where the longest sequence stands, and its tokens."""
        sizes = [_longer(pair) for pair in zip(self.chosen, self.rejected, strict=True)]
        row = max(range(len(sizes)), key=sizes.__getitem__)
        return self.places[row], sizes[row]


@op(makes="samples", rows="all")
def pairs(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    files: Files,
    batch: Batch,
    question: str = "question",
    chosen: str = "chosen",
    rejected: str = "rejected",
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    shuffle: bool = True,
) -> Pairs:
    """The next ``batch`` pairs of responses to one question, one better than the other: two rows a pair.

    Each row is prompt, response, end token, with ``loss_mask`` true on the last two. Row 2 p is the chosen
    response of pair p and row 2 p + 1 the rejected one; ``group`` is p (the data of DPO, arXiv 2305.18290).
    Epochs as in data.prompts. Records ``data/overlong``, the fraction of pairs with a row over
    ``max_tokens``, where that is given; those pairs are dropped.

    Attributes:
        files: .parquet or .jsonl files, one after the other.
        batch: pairs an iteration, at least 1; or all, the whole set once, in file order.
        question: the column with the question: text, or a list of chat messages {role, content}.
        chosen: the column with the better response.
        rejected: the column with the worse response.
        template: chat puts the question through the tokenizer's chat template; plain takes it as it is.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question.
        max_tokens: pairs with a row of more tokens than this are dropped; null keeps all.
        shuffle: whether epochs are shuffled, or in file order.

    Example:
        pairs: {op: data.pairs, files: [preferences.jsonl], batch: 64}
    """
    data = load_pairs(
        tokenizer,
        files=files,
        question=question,
        chosen=chosen,
        rejected=rejected,
        template=template,
        system=system,
        suffix=suffix,
        max_tokens=max_tokens,
    )
    if max_tokens is not None:
        ctx.record("data/overlong", data.overlong, count=data.overlong + len(data.places))
    # a position counts the rows that were written, two a pair
    return _pairs(data, pick(len(data.places), batch, ctx.position // 2, ctx.seed, shuffle))


def load_pairs(
    tokenizer: Tokenizer,
    *,
    files: Sequence[str],
    question: str = "question",
    chosen: str = "chosen",
    rejected: str = "rejected",
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_tokens: int | None = None,
) -> PairSet:
    """All that ``data.pairs`` with these attributes would go through.

    Raises:
        DataError: as ``rlgraph.nodes.dataset.load_prompts``.
    """

    def load(answer: str) -> ExampleSet:
        return load_examples(
            tokenizer,
            files=files,
            question=question,
            answer=answer,
            template=template,
            system=system,
            suffix=suffix,
        )

    better, worse = load(chosen), load(rejected)
    lengths = [_longer(pair) for pair in zip(better.pairs, worse.pairs, strict=True)]
    kept = [row for row, length in enumerate(lengths) if max_tokens is None or length <= max_tokens]
    if not kept:
        raise DataError(
            f"{', '.join(files)}: all {len(lengths)} pairs have over {max_tokens} tokens, the shortest "
            f"{min(lengths)}; raise max_tokens"
        )
    columns = ([column[row] for row in kept] for column in (better.places, better.pairs, worse.pairs))
    return PairSet(*columns, overlong=len(lengths) - len(kept))


def _pairs(data: PairSet, picked: Sequence[int]) -> Pairs:
    import torch

    rows = [side[row] for row in picked for side in (data.chosen, data.rejected)]
    mask = [[False] * len(before) + [True] * len(after) for before, after in rows]
    return Pairs(
        tokens=Ragged.of([before + after for before, after in rows], torch.int64),
        loss_mask=Ragged.of(mask, torch.bool),
        chosen=torch.arange(len(rows)) % 2 == 0,
        group=torch.arange(len(rows)) // 2,
    )


def _longer(pair: tuple[Sequences, Sequences]) -> int:
    """Tokens of the longer row of a pair."""
    return max(len(before) + len(after) for before, after in pair)
