"""Data sources: questions and answers from files of many kinds and from saved ``datasets``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlgraph.nodes.data.source import SourceAttributes, record_dropped, sequences
from rlgraph.nodes.support.chat_template import CutSide, Template, cut
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.row_form import Turns
from rlgraph.ops import Context, Tokenizer, boolean, int64, op, prompt_tokens, samples, text, tokens
from rlgraph.ops import prompts as prompts_domain
from rlgraph.ops.tools import ShownTool, Tool, tool_schema

if TYPE_CHECKING:
    from rlgraph.nodes.support.dataset import DataSet

Truncate = CutSide | Literal["refuse"]


def load_prompts(tokenizer: Tokenizer, **reading: Any) -> "DataSet":
    """Load all prompts that ``data.prompts`` with these attributes goes through."""
    from rlgraph.nodes.support import dataset  # only a run reads rows

    return dataset.load_prompts(tokenizer, **reading)


def load_examples(tokenizer: Tokenizer, **reading: Any) -> "DataSet":
    """Load all examples that ``data.examples`` with these attributes goes through."""
    from rlgraph.nodes.support import dataset

    return dataset.load_examples(tokenizer, **reading)


class Prompts(NamedTuple):
    """The columns that ``data.prompts`` writes."""

    prompt: int64[prompts_domain, prompt_tokens]
    question: text[prompts_domain]
    answer: text[prompts_domain]
    source: text[prompts_domain]


class Examples(NamedTuple):
    """The columns that ``data.examples`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]


@op(
    makes="prompts",
    rows="all",
    columns="columns",
    load=load_prompts,
    roles={"rows": "batch", "prompt_limit": "max_prompt_tokens"},
)
def prompts(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    source: SourceAttributes,
    question: str = "question",
    answer: str | None = "answer",
    answer_after: str | None = None,
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
    tools: dict[str, ShownTool] | None = None,
    row_tools: str | None = None,
    system: str | None = None,
    suffix: str = "",
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None,
    truncate: Truncate | None = None,
    shuffle: bool = True,
) -> Prompts:
    """The next ``batch`` questions, tokenised, with their answers.

    Each epoch goes through every row once in an order drawn from (seed, epoch); batches run on across epochs,
    so no row is lost at the end of an epoch. With ``weights`` each source has its own epochs, and gives its
    share of every 1000 rows (of each batch, if a weight changes over iterations), in an order drawn from the
    seed. ``source`` is the name of a row's source in ``files``, or of the first file of a list. Records
    ``data/epoch``, how often all rows have been taken so far (with ``weights`` for each source,
    ``data/epoch/NAME``). With ``max_prompt_tokens`` it records ``data/overlong``, the fraction of rows that
    are longer (with several sources also for each, ``data/overlong/NAME``), and with ``where`` it records
    ``data/filtered``, the fraction of rows left out.

    Attributes:
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer: text, a number, or the tests of a program {inputs, outputs}. Lists
            of right answers go into a column ``answers``. null: there is no such column; if a question's
            messages end with the assistant's, that message is the answer, else the answer is empty.
        answer_after: keep only what follows the last occurrence of this marker in the answer, e.g. "####". If
            no row of a source has the marker, its answers are kept whole.
        template: chat applies the tokenizer's chat template to the question; plain uses the question as it
            is.
        template_options: further arguments of the chat template, as in {enable_thinking: false}; with
            {continue_final_message: true} the policy continues a question's last turn, which is the
            assistant's.
        tools: the tools that the chat template shows the policy: "${nodes.rollout.tools}" for those of a
            rollout.agent.
        row_tools: the column with the tools that a row shows: names from ``tools``, a mapping of these, or
            schemas; null: each row shows all of ``tools``.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question, e.g. an instruction about the form of the answer; if the question
            is a list of messages, after the user's last message.
        max_prompt_tokens: rows with more tokens than this are dropped and counted; null keeps all.
        truncate: the side on which longer rows are cut (left, right or middle) instead of being dropped;
            refuse: the run does not start; null: they are dropped.
        shuffle: whether to shuffle each epoch; false: file order.

    Example:
        prompts: {op: data.prompts, files: [gsm8k/train.parquet], batch: 128, answer_after: "####"}
    """
    data = load_prompts(
        tokenizer,
        files=source.files,
        question=question,
        answer=answer,
        answer_after=answer_after,
        template=template,
        template_options=shown(template_options, tools),
        row_tools=row_tools,
        system=system,
        suffix=suffix,
        where=source.where,
        columns=source.columns,
        max_prompt_tokens=max_prompt_tokens,
        truncate=truncate,
    )
    is_cut = truncate is not None
    record_dropped(ctx, data, source.where is not None, max_prompt_tokens is not None, is_cut)
    rows = source.next_rows(data, ctx, shuffle)
    if source.batch == "all":
        ctx.record("data/rows", [len(rows)], kind="sum", over="rows")
        if len(data.by_source) > 1:
            for name, rows_of_source in data.by_source.items():
                ctx.record(f"data/rows/{name}", [len(rows_of_source)], kind="sum", over="rows")
    ids = data.column("ids", rows)
    if max_prompt_tokens and truncate and truncate != "refuse":  # which refuses the set where one is longer
        ids = [cut(prompt_ids, max_prompt_tokens, truncate, []) for prompt_ids in ids]
    written = Prompts(
        prompt=Ragged.of(ids, torch.int64),
        question=data.column("question", rows),
        answer=data.column("answer", rows),
        source=[data.files[number][0] for number in data.column("file", rows)],
    )
    return source.with_file_columns(written, data, rows)


@op(
    makes="samples",
    rows="all",
    columns="columns",
    load=load_examples,
    roles={"rows": "batch", "total_limit": "max_tokens"},
)
def examples(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    source: SourceAttributes,
    question: str = "question",
    answer: str | None = "answer",
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
    tools: dict[str, ShownTool] | None = None,
    row_tools: str | None = None,
    system: str | None = None,
    suffix: str = "",
    assistant_turns: Turns = "last",
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    shuffle: bool = True,
) -> Examples:
    """The next ``batch`` question-answer pairs as sequences to imitate: prompt, answer, end token.

    ``loss_mask`` is true on the answer and the end token, or on each turn of the assistant. Sources, epochs
    and metrics are those of data.prompts, with ``max_tokens`` in place of ``max_prompt_tokens``.

    Attributes:
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer, text or messages; null: the answer is the assistant's message with
            which the question's messages end. If an answer's messages begin with the question, the question
            is removed from them.
        template: chat applies the tokenizer's chat template to the question; plain uses the question as it
            is.
        template_options: further arguments of the chat template, as in {enable_thinking: false}.
        tools: the tools that the chat template shows the policy, such as those of a rollout.agent.
        row_tools: the column with the tools that a row shows: names from ``tools``, a mapping of these, or
            schemas; null: each row shows all of ``tools``.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question; if the question is a list of messages, after the user's last
            message.
        assistant_turns: which turns of a conversation are learned: the assistant's last, or all; if the
            answer is a list of messages, only turns in the answer.
        max_tokens: rows with more tokens than this, prompt and answer together, are dropped; null keeps all.
        shuffle: whether to shuffle each epoch; false: file order.

    Example:
        examples: {op: data.examples, files: [demo_files/train.parquet], batch: 64, template: plain}
    """
    data = load_examples(
        tokenizer,
        files=source.files,
        question=question,
        answer=answer,
        template=template,
        template_options=shown(template_options, tools),
        row_tools=row_tools,
        system=system,
        suffix=suffix,
        assistant_turns=assistant_turns,
        where=source.where,
        columns=source.columns,
        max_tokens=max_tokens,
    )
    record_dropped(ctx, data, source.where is not None, max_tokens is not None)
    rows = source.next_rows(data, ctx, shuffle)
    tokens, loss_mask = sequences(data.examples(rows))
    return source.with_file_columns(Examples(tokens, loss_mask), data, rows)


def shown(options: dict[str, Any] | None, tools: Mapping[str, Tool] | None) -> dict[str, Any] | None:
    """Return the options of a chat template with the schemas of tools among them."""
    if not tools:
        return options
    return {**(options or {}), "tools": [tool_schema(name, hook.body) for name, hook in tools.items()]}
