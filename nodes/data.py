"""Data sources: questions and answers from parquet and JSON-lines files.

A batch is a function of the seed and of how many rows earlier iterations took, so nothing but that number
needs saving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rlgraph.engines import Context, Tokenizer
from rlgraph.nodes.dataset import DataError, PromptSet, Template, load_examples, load_prompts
from rlgraph.nodes.ragged import Ragged
from rlgraph.op import op
from rlgraph.types import File, boolean, int64, prompt_tokens, samples, text, tokens
from rlgraph.types import prompts as prompts_domain

__all__ = ["DataError", "PromptSet", "examples", "load_prompts", "prompts"]

Batch = Annotated[int, Field(ge=1)] | Literal["all"]
Files = Annotated[list[File], Field(min_length=1)]


class Prompts(NamedTuple):
    """What ``data.prompts`` writes."""

    prompt: int64[prompts_domain, prompt_tokens]
    question: text[prompts_domain]
    answer: text[prompts_domain]


class Examples(NamedTuple):
    """What ``data.examples`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]


@op(makes="prompts", rows="all")
def prompts(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    files: Files,
    batch: Batch,
    question: str = "question",
    answer: str | None = "answer",
    answer_after: str | None = None,
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None,
    shuffle: bool = True,
) -> Prompts:
    """The next ``batch`` questions, tokenised, with their answers.

    Each epoch goes through every row once in an order drawn from (seed, epoch); batches run on across epochs,
    so no row is lost at the end of one. Records ``data/overlong``, the fraction of rows over
    ``max_prompt_tokens``, where that is given; those rows are dropped.

    Attributes:
        files: .parquet or .jsonl files, one after the other.
        batch: rows an iteration, at least 1; or all, the whole set once, in file order.
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer; null where there is none, and answers are empty.
        answer_after: keep what follows the last occurrence of this marker in the answer, e.g. "####".
        template: chat puts the question through the tokenizer's chat template; plain takes it as it is.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question, e.g. an instruction on the answer's form.
        max_prompt_tokens: rows with more tokens than this are dropped; null keeps all.
        shuffle: whether epochs are shuffled, or in file order.

    Example:
        prompts: {op: data.prompts, files: [gsm8k/train.parquet], batch: 128, answer_after: "####"}
    """
    data = load_prompts(
        tokenizer,
        files=files,
        question=question,
        answer=answer,
        answer_after=answer_after,
        template=template,
        system=system,
        suffix=suffix,
        max_prompt_tokens=max_prompt_tokens,
    )
    if max_prompt_tokens is not None:
        ctx.record("data/overlong", data.overlong, count=data.overlong + len(data.places))
    rows = pick(len(data.places), batch, ctx.position, ctx.seed, shuffle)
    return _prompts(data, rows)


@op(makes="samples", rows="all")
def examples(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    files: Files,
    batch: Batch,
    question: str = "question",
    answer: str = "answer",
    template: Template = "chat",
    system: str | None = None,
    suffix: str = "",
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    shuffle: bool = True,
) -> Examples:
    """The next ``batch`` question-answer pairs as sequences to imitate: prompt, answer, end token.

    ``loss_mask`` is true on the answer and the end token. Epochs as in data.prompts. Records
    ``data/overlong``, the fraction of rows over ``max_tokens``, where that is given; those rows are dropped.

    Attributes:
        files: .parquet or .jsonl files, one after the other.
        batch: rows an iteration, at least 1; or all, the whole set once, in file order.
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer.
        template: chat puts the question through the tokenizer's chat template; plain takes it as it is.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question.
        max_tokens: rows with more tokens than this, prompt and answer together, are dropped; null keeps all.
        shuffle: whether epochs are shuffled, or in file order.

    Example:
        examples: {op: data.examples, files: [demo_files/train.parquet], batch: 64, template: plain}
    """
    data = load_examples(
        tokenizer,
        files=files,
        question=question,
        answer=answer,
        template=template,
        system=system,
        suffix=suffix,
        max_tokens=max_tokens,
    )
    if max_tokens is not None:
        ctx.record("data/overlong", data.overlong, count=data.overlong + len(data.pairs))
    return _examples(
        [data.pairs[row] for row in pick(len(data.pairs), batch, ctx.position, ctx.seed, shuffle)]
    )


def pick(size: int, batch: int | Literal["all"], position: int, seed: int, shuffle: bool) -> list[int]:
    """Rows ``[batch]`` of a set of ``size`` rows, after ``position`` rows were taken.

    Example:
        >>> pick(3, 4, 2, 0, shuffle=False)
        [2, 0, 1, 2]
    """
    import numpy

    if batch == "all":
        return list(range(size))
    taken = [divmod(row, size) for row in range(position, position + batch)]
    if not shuffle:
        return [place for _, place in taken]
    orders = {
        epoch: numpy.random.default_rng([seed, epoch]).permutation(size).tolist()
        for epoch in {e for e, _ in taken}
    }
    return [orders[epoch][place] for epoch, place in taken]


def _prompts(data: PromptSet, rows: Sequence[int]) -> Prompts:
    import torch

    return Prompts(
        Ragged.of([data.prompts[row] for row in rows], torch.int64),
        [data.questions[row] for row in rows],
        [data.answers[row] for row in rows],
    )


def _examples(pairs: Sequence[tuple[list[int], list[int]]]) -> Examples:
    import torch

    mask = [[False] * len(before) + [True] * len(after) for before, after in pairs]
    return Examples(
        Ragged.of([before + after for before, after in pairs], torch.int64), Ragged.of(mask, torch.bool)
    )
