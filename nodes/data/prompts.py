"""Data sources: questions and answers from files of many kinds and from saved ``datasets``.

A batch is a function of the seed and of how many rows earlier iterations took, so nothing but that number
needs saving.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeFloat

from rlgraph.nodes.support.chat_template import CutSide, Template, cut
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.mixture import mixture_of, pick, pick_mixed
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.row_field import FileColumns, as_column, type_of
from rlgraph.nodes.support.row_form import Turns
from rlgraph.ops import Context, File, Tokenizer, boolean, int64, op, prompt_tokens, samples, text, tokens
from rlgraph.ops import prompts as prompts_domain
from rlgraph.ops.tools import ShownTool, Tool, tool_schema

if TYPE_CHECKING:
    from rlgraph.nodes.support.dataset import DataSet
    from rlgraph.nodes.support.row_tokens import Example

BatchSize = Annotated[int, Field(ge=1)] | Literal["all"]
Listed = Annotated[list[File], Field(min_length=1)]
Files = Listed | Annotated[dict[str, Listed], Field(min_length=1)]
Truncate = CutSide | Literal["refuse"]
Scalar = str | int | float | bool
Where = dict[str, Scalar | list[Scalar]]


def _some(weights: dict[str, float]) -> dict[str, float]:
    """Return weights, if a batch has rows of some source."""
    if not any(weights.values()):
        raise ValueError("must have a weight above 0")
    return weights


Shares = Annotated[dict[str, NonNegativeFloat], AfterValidator(_some)]


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
    roles={"rows": "batch", "prompt_limit": "max_prompt_tokens"},
)
def prompts(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    files: Files,
    batch: BatchSize,
    weights: Shares | None = None,
    where: Where | None = None,
    columns: FileColumns | None = None,
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
    so no row is lost at the end of one. With ``weights`` each source has epochs of its own, and of every 1000
    rows (of each batch, where a weight has a course) it gives its share, in an order drawn from the seed.
    ``source`` is the name of a row's source in ``files``, or of the first file of a list. Records
    ``data/epoch``, how often all rows were taken by then (with ``weights`` that of each source,
    ``data/epoch/NAME``), and, where they are given, ``data/overlong``, the fraction of rows over
    ``max_prompt_tokens`` (with several sources each one's as well, ``data/overlong/NAME``), and
    ``data/filtered``, that which ``where`` leaves out.

    Attributes:
        files: .parquet, .arrow, .jsonl, .json, .csv or .tsv files, folders of datasets' save_to_disk,
            patterns such as data/*.parquet, or URLs of these (s3://, hf://); one after the other, or by
            name, as several sources: {gsm8k: [a.jsonl], math: [b.parquet]}.
        batch: rows per iteration, at least 1; or all, the whole set once, in file order.
        weights: how much of a batch each source gives, as {gsm8k: 3, math: 1}, at least 0, each a number or a
            course; null: as many as it has. With batch: all they have no meaning.
        where: column -> the value that rows must have, or a list of such: {split: train, level: [4, 5]}.
        columns: more fields of the files, which become columns of the graph, each with its type (text, json,
            float32, int64 or boolean): {level: float32, tests: json}; or, where names differ or rows lack
            one, {gold: {from: reward_model.ground_truth, type: text, default: ""}}.
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer: text, a number, or the tests of a program {inputs, outputs}; lists
            of right ones are a column `answers`; null where there is none: of messages that end with the
            assistant's, the answer is that one, else it is empty.
        answer_after: keep what follows the last occurrence of this marker in the answer, e.g. "####".
        template: chat puts the question through the tokenizer's chat template; plain takes it as it is.
        template_options: what the chat template is given beside the messages, as {enable_thinking: false};
            {continue_final_message: true} has the policy go on with a question's last turn, the assistant's.
        tools: what the chat template shows the policy as tools: "${nodes.rollout.tools}" of a rollout.agent.
        row_tools: the column with the tools that a row shows: names of `tools`, a mapping of these, or
            schemas; null: each shows all of `tools`.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question, e.g. an instruction on the answer's form; of messages, behind the
            user's last.
        max_prompt_tokens: rows with more tokens than this are dropped and counted; null keeps all.
        truncate: where longer rows are cut, left, right or middle, in place of dropping them; refuse ends the
            run before it starts; null drops.
        shuffle: whether epochs are shuffled, or in file order.

    Example:
        prompts: {op: data.prompts, files: [gsm8k/train.parquet], batch: 128, answer_after: "####"}
    """
    from rlgraph.nodes.support.dataset import load_prompts  # only a run reads rows

    data = load_prompts(
        tokenizer,
        files=files,
        question=question,
        answer=answer,
        answer_after=answer_after,
        template=template,
        template_options=shown(template_options, tools),
        row_tools=row_tools,
        system=system,
        suffix=suffix,
        where=where,
        columns=columns,
        max_prompt_tokens=max_prompt_tokens,
        truncate=truncate,
    )
    record_dropped(ctx, data, where is not None, max_prompt_tokens is not None, truncate is not None)
    rows = rows_of(data, ctx, batch, weights, shuffle)
    if batch == "all":
        ctx.record("data/rows", [len(rows)], kind="sum", over="rows")
        for name, own in data.by_source.items() if len(data.by_source) > 1 else ():
            ctx.record(f"data/rows/{name}", [len(own)], kind="sum", over="rows")
    taken = data.column("ids", rows)
    if max_prompt_tokens and truncate:  # where it refuses, none is longer
        taken = [cut(ids, max_prompt_tokens, truncate, []) for ids in taken]
    ids = Ragged.of(taken, torch.int64)
    sources = [data.files[number][0] for number in data.column("file", rows)]
    own = Prompts(ids, data.column("question", rows), data.column("answer", rows), sources)
    return with_columns(own, data, rows, columns)


@op(makes="samples", rows="all", columns="columns", roles={"rows": "batch"})
def examples(
    tokenizer: Tokenizer,
    ctx: Context,
    *,
    files: Files,
    batch: BatchSize,
    weights: Shares | None = None,
    where: Where | None = None,
    columns: FileColumns | None = None,
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
    and what is recorded as in data.prompts, with ``max_tokens`` in place of ``max_prompt_tokens``.

    Attributes:
        files: .parquet, .arrow, .jsonl, .json, .csv or .tsv files, folders of datasets' save_to_disk,
            patterns such as data/*.parquet, or URLs of these (s3://, hf://); one after the other, or by
            name, as several sources: {gsm8k: [a.jsonl], math: [b.parquet]}.
        batch: rows per iteration, at least 1; or all, the whole set once, in file order.
        weights: how much of a batch each source gives, as {gsm8k: 3, math: 1}, at least 0, each a number or a
            course; null: as many as it has. With batch: all they have no meaning.
        where: column -> the value that rows must have, or a list of such: {split: train, level: [4, 5]}.
        columns: more fields of the files, which become columns of the graph, each with its type (text, json,
            float32, int64 or boolean): {level: float32, tests: json}; or, where names differ or rows lack
            one, {gold: {from: reward_model.ground_truth, type: text, default: ""}}.
        question: the column with the question: text, or a list of chat messages {role, content}.
        answer: the column with the answer, text or messages; null: of messages that end with the assistant's,
            that one. Messages that begin with the question are taken without it.
        template: chat puts the question through the tokenizer's chat template; plain takes it as it is.
        template_options: what the chat template is given beside the messages, as {enable_thinking: false}.
        tools: what the chat template shows the policy as tools, as of a rollout.agent.
        row_tools: the column with the tools that a row shows: names of `tools`, a mapping of these, or
            schemas; null: each shows all of `tools`.
        system: a system message; with plain, text put before the question.
        suffix: text put after the question; of messages, behind the user's last.
        assistant_turns: what is learnt of a conversation: the assistant's last turn, or all; of an answer in
            messages, those that are in it.
        max_tokens: rows with more tokens than this, prompt and answer together, are dropped; null keeps all.
        shuffle: whether epochs are shuffled, or in file order.

    Example:
        examples: {op: data.examples, files: [demo_files/train.parquet], batch: 64, template: plain}
    """
    from rlgraph.nodes.support.dataset import load_examples

    data = load_examples(
        tokenizer,
        files=files,
        question=question,
        answer=answer,
        template=template,
        template_options=shown(template_options, tools),
        row_tools=row_tools,
        system=system,
        suffix=suffix,
        assistant_turns=assistant_turns,
        where=where,
        columns=columns,
        max_tokens=max_tokens,
    )
    record_dropped(ctx, data, where is not None, max_tokens is not None)
    rows = rows_of(data, ctx, batch, weights, shuffle)
    return with_columns(Examples(*sequences(data.examples(rows))), data, rows, columns)


def with_columns(own: Any, data: "DataSet", rows: Sequence[int], columns: FileColumns | None) -> Any:
    """Return what an op writes of rows of a set, and beside it the columns that a graph names."""
    types = {name: type_of(spec) for name, spec in (columns or {}).items()}
    values = data.more(rows) if types else []
    more = {name: as_column(kind, [row[name] for row in values]) for name, kind in types.items()}
    return SimpleNamespace(**own._asdict(), **more)


def shown(options: dict[str, Any] | None, tools: Mapping[str, Tool] | None) -> dict[str, Any] | None:
    """Return the options of a chat template with the schemas of tools among them."""
    if not tools:
        return options
    return {**(options or {}), "tools": [tool_schema(name, hook.body) for name, hook in tools.items()]}


def rows_of(
    data: "DataSet", ctx: Context, batch: BatchSize, weights: Shares | None, shuffle: bool, written: int = 1
) -> list[int]:
    """Return rows ``[batch]`` of a set, each of which writes some, after those that earlier iterations took.

    Records ``data/epoch``, how often all rows were taken; with ``weights`` of each source, as it has its own.

    Raises:
        DataError: ``weights`` does not name the sources.
    """
    position = ctx.position // written  # a position counts the rows that were written
    if batch == "all":
        return pick(len(data), batch, position, ctx.seed, shuffle)
    if weights is None:
        ctx.record("data/epoch", (position + batch) / len(data), over="iterations")
        return pick(len(data), batch, position, ctx.seed, shuffle)
    mixture = mixture_of(data.by_source, weights, ctx.courses, ctx.batch)
    for (name, own), given in zip(data.by_source.items(), mixture.given(position + batch), strict=True):
        ctx.record(f"data/epoch/{name}", given / len(own), over="iterations")
    for name, course in ctx.courses.items():
        if name.startswith("weights."):  # where a filter asks for more, rows are ahead of the iteration
            ctx.metrics.pop(f"{ctx.node}/{name}", None)
            ctx.record(name, course.at(1 + position // ctx.batch), over="iterations")
    return pick_mixed(data.by_source, mixture, batch, position, ctx.seed, shuffle)


def record_dropped(ctx: Context, data: "DataSet", filtered: bool, limited: bool, kept: bool = False) -> None:
    """Record the fraction of all rows that ``where`` drops, and of the rest the fraction that is too long.

    The latter is recorded by source, too, where there are several. ``kept`` says that rows that are too long
    are there all the same, shortened.
    """
    left = len(data) + data.overlong * (not kept)
    if filtered:
        ctx.record("data/filtered", data.filtered, data.filtered + left, kind="share", over="rows")
    if limited:
        ctx.record("data/overlong", data.overlong, left, kind="share", over="rows")
    for name, own in data.by_source.items() if limited and len(data.by_source) > 1 else ():
        overlong = data.overlong_of.get(name, 0)
        total = len(own) + overlong * (not kept)
        ctx.record(f"data/overlong/{name}", overlong, total, kind="share", over="rows")


def sequences(rows: Sequence["Example"]) -> tuple[Ragged, Ragged]:
    """Return tokens and loss mask ``[samples, tokens]`` of examples."""
    ids, masks = zip(*rows, strict=True)
    return Ragged.of(ids, torch.int64), Ragged.of(masks, torch.bool)
