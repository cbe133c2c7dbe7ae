"""A data source of pairs: a question with a chosen and a rejected response."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from rlgraph.nodes.data.prompts import load_examples
from rlgraph.nodes.data.source import SourceAttributes, record_dropped, sequences
from rlgraph.nodes.support.chat_template import Template
from rlgraph.nodes.support.lazy import numpy, torch
from rlgraph.nodes.support.row_field import DataError
from rlgraph.nodes.support.row_form import Turns
from rlgraph.ops import Context, Tokenizer, boolean, int64, op, samples, tokens

if TYPE_CHECKING:
    from rlgraph.nodes.support.dataset import DataSet, SourceFiles
    from rlgraph.nodes.support.row_tokens import Example


class Pairs(NamedTuple):
    """The columns that ``data.pairs`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    chosen: boolean[samples]
    group: int64[samples]


def load_pairs(
    tokenizer: Tokenizer,
    *,
    files: "SourceFiles",
    chosen: str = "chosen",
    rejected: str = "rejected",
    max_tokens: int | None = None,
    **reading: Any,
) -> "DataSet":
    """Load all pairs that ``data.pairs`` with these attributes goes through.

    Raises:
        DataError: as ``rlgraph.nodes.support.dataset.load_prompts``.
    """
    better = load_examples(tokenizer, files=files, answer=chosen, other=rejected, **reading)
    worse = load_examples(tokenizer, files=files, answer=rejected, other=chosen, **reading)
    longer = numpy.maximum(better.lengths, worse.lengths)
    both = replace(better, tables=better.tables + worse.tables, lengths=longer)
    return _without_equal(both).within(max_tokens, "max_tokens")


@op(
    makes="samples",
    of_each=2,
    rows="all",
    columns="columns",
    load=load_pairs,
    roles={"rows": "batch", "total_limit": "max_tokens"},
)
def pairs(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    source: SourceAttributes,
    question: str | None = "question",
    chosen: str = "chosen",
    rejected: str = "rejected",
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
    system: str | None = None,
    suffix: str = "",
    assistant_turns: Turns = "last",
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    shuffle: bool = True,
) -> Pairs:
    """The next ``batch`` pairs of responses to one question, one better than the other: two rows per pair.

    Each row is prompt, response, end token, with ``loss_mask`` true on the last two. Row 2 p is the chosen
    response of pair p and row 2 p + 1 the rejected one; ``group`` is p (the data of DPO, arXiv 2305.18290).
    Sources, epochs and metrics are those of data.prompts; ``data/overlong`` is the fraction of pairs with a
    row longer than ``max_tokens``. Pairs whose two rows are equal teach nothing: they are dropped, and
    counted in ``data/equal``.

    Attributes:
        batch: pairs per iteration, at least 1; or all: the whole set once, in file order.
        question: the column with the question: text, or a list of chat messages {role, content}; null: the
            question is the messages with which both responses begin.
        chosen: the column with the better response: text, or messages that may begin with the question.
        rejected: the column with the worse response.
        template: chat applies the tokenizer's chat template to the question; plain uses the question as it
            is.
        template_options: further arguments of the chat template.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question; if the question is a list of messages, after the user's last
            message.
        assistant_turns: which turns of responses in messages are compared: the assistant's last, or all.
        max_tokens: pairs with a row that has more tokens than this are dropped; null keeps all.
        shuffle: whether to shuffle each epoch; false: file order.

    Example:
        pairs: {op: data.pairs, files: [preferences.jsonl], batch: 64}
    """
    data = load_pairs(
        tokenizer,
        files=source.files,
        question=question,
        chosen=chosen,
        rejected=rejected,
        template=template,
        template_options=template_options,
        system=system,
        suffix=suffix,
        assistant_turns=assistant_turns,
        where=source.where,
        columns=source.columns,
        max_tokens=max_tokens,
    )
    record_dropped(ctx, data, source.where is not None, max_tokens is not None)
    if data.equal:
        total = len(data) + data.overlong + data.equal
        ctx.record("data/equal", data.equal, total, kind="share", over="rows")
    picked = source.next_rows(data, ctx, shuffle, written_per_row=2)
    examples: list[Example] = []
    for pair in zip(data.examples(picked), data.examples(picked, side=1), strict=True):
        examples += pair
    number = torch.arange(len(examples))
    tokens, loss_mask = sequences(examples)
    written = Pairs(tokens, loss_mask, chosen=number % 2 == 0, group=number // 2)
    rows = [row for row in picked for _ in range(2)]
    return source.with_file_columns(written, data, rows)


def _without_equal(both: "DataSet") -> "DataSet":
    """Return the pairs whose sides are not the same tokens: the others have no gradient.

    Raises:
        DataError: all are such.
    """
    ids = [table["ids"].combine_chunks() for table in both.tables]
    lengths = [table["length"].to_numpy() for table in both.tables]
    differ = lengths[0] != lengths[1]
    for row in numpy.flatnonzero(~differ).tolist():
        differ[row] = ids[0][row].values != ids[1][row].values
    equal = int((~differ).sum())
    if equal == len(differ):
        law = f"{both.place(0)}: chosen equals rejected, here and in all rows"
        raise DataError(f"{law}; name the columns that differ with chosen: and rejected:")
    return replace(both, rows=both.rows[differ], lengths=both.lengths[differ], equal=equal)
