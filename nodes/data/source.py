"""The common part of all sources of files: attributes, the rows that an iteration takes, and metrics.

A batch is a function of the seed and of how many rows earlier iterations took, so nothing but that number
needs saving.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.mixture import mixture_of, pick, pick_mixed
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.row_field import FileColumns, as_column, type_of
from rlgraph.ops import Context, File
from rlgraph.ops.attribute_group import AttributeGroup
from rlgraph.ops.output_record import OutputRecord, with_columns
from rlgraph.records import dataclass

if TYPE_CHECKING:
    from rlgraph.nodes.support.dataset import DataSet
    from rlgraph.nodes.support.row_tokens import Example

BatchSize = Annotated[int, Field(ge=1)] | Literal["all"]
FileList = Annotated[list[File], Field(min_length=1)]
Files = FileList | Annotated[dict[str, FileList], Field(min_length=1)]
Scalar = str | int | float | bool
Where = dict[str, Scalar | list[Scalar]]


def _with_a_weight_above_0(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        raise ValueError("must have a weight above 0")
    return weights


Shares = Annotated[dict[str, NonNegativeFloat], AfterValidator(_with_a_weight_above_0)]


@dataclass(frozen=True, kw_only=True)
class SourceAttributes(AttributeGroup):
    """The files of a data source, the rows of them that are read, and how many an iteration takes.

    Attributes:
        files: .parquet, .arrow, .jsonl, .json, .csv or .tsv files, folders written by save_to_disk of
            ``datasets``, patterns such as data/*.parquet, or URLs of any of these (s3://, hf://). A list is
            read in order; a mapping names several sources: {gsm8k: [a.jsonl], math: [b.parquet]}.
        batch: rows per iteration, at least 1; or all: the whole set once, in file order.
        weights: the relative share of each source in a batch, at least 0, as in {gsm8k: 3, math: 1}; each may
            change over iterations. null: in proportion to the rows of each source. They have no effect with
            ``batch: all``.
        where: column -> the value that its rows must have, or a list of accepted values: {split: train,
            level: [4, 5]}.
        columns: more fields of the files that become columns of the graph, each with its type (text, json,
            float32, int64 or boolean): {level: float32, tests: json}. If names differ or some rows lack the
            field: {gold: {from: reward_model.ground_truth, type: text, default: ""}}.
    """

    files: Files
    batch: BatchSize
    weights: Shares | None = None
    where: Where | None = None
    columns: FileColumns | None = None

    def with_file_columns(self, written: OutputRecord, data: "DataSet", rows: Sequence[int]) -> OutputRecord:
        """Return what an op writes of rows of a set, with the columns of its files that a graph names."""
        if not self.columns:
            return with_columns(written, {})
        values = data.more(rows)
        more = {}
        for name, spec in self.columns.items():
            more[name] = as_column(type_of(spec), [row[name] for row in values])
        return with_columns(written, more)

    def next_rows(self, data: "DataSet", ctx: Context, shuffle: bool, written_per_row: int = 1) -> list[int]:
        """Return rows ``[batch]`` of a data set, those after the ones that earlier iterations took.

        Records ``data/epoch``, how often all rows were taken; with ``weights`` that of each source, as it has
        epochs of its own.

        Raises:
            DataError: ``weights`` does not name the sources.
        """
        position = ctx.position // written_per_row  # a position counts the rows that were written
        if self.batch == "all":
            return pick(len(data), "all", position, ctx.seed, shuffle)
        if self.weights is None:
            ctx.record("data/epoch", (position + self.batch) / len(data), over="iterations")
            return pick(len(data), self.batch, position, ctx.seed, shuffle)
        mixture = mixture_of(data.by_source, self.weights, ctx.courses, ctx.batch)
        rows_so_far = mixture.given(position + self.batch)
        for (name, rows_of_source), count in zip(data.by_source.items(), rows_so_far, strict=True):
            ctx.record(f"data/epoch/{name}", count / len(rows_of_source), over="iterations")
        for name, course in ctx.courses.items():
            if name.startswith("weights."):
                # where a filter asks for more rows, they are ahead of the iteration, and so is the course
                ctx.metrics.pop(f"{ctx.node}/{name}", None)
                ctx.record(name, course.at(1 + position // ctx.batch), over="iterations")
        return pick_mixed(data.by_source, mixture, self.batch, position, ctx.seed, shuffle)


def record_dropped(
    ctx: Context, data: "DataSet", is_filtered: bool, is_limited: bool, is_cut: bool = False
) -> None:
    """Record the share of all rows that ``where`` drops, and of the rest the share that is too long.

    The latter is recorded by source, too, where there are several.

    Args:
        ctx: where metrics go.
        data: the set, without the rows that were dropped.
        is_filtered: whether there is a ``where``.
        is_limited: whether there is a limit of tokens.
        is_cut: whether rows that are too long are there all the same, shortened.
    """
    rows_after_filter = len(data) if is_cut else len(data) + data.overlong
    if is_filtered:
        ctx.record(
            "data/filtered", data.filtered, data.filtered + rows_after_filter, kind="share", over="rows"
        )
    if not is_limited:
        return
    ctx.record("data/overlong", data.overlong, rows_after_filter, kind="share", over="rows")
    if len(data.by_source) == 1:
        return
    for name, rows in data.by_source.items():
        overlong = data.overlong_of.get(name, 0)
        total = len(rows) if is_cut else len(rows) + overlong
        ctx.record(f"data/overlong/{name}", overlong, total, kind="share", over="rows")


def sequences(rows: "Sequence[Example]") -> tuple[Ragged, Ragged]:
    """Return tokens and loss mask ``[samples, tokens]`` of examples."""
    ids, masks = zip(*rows, strict=True)
    return Ragged.of(ids, torch.int64), Ragged.of(masks, torch.bool)
