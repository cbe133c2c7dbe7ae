"""Rows that last: a store of rows that came, some of which are given again in later iterations.

                   ┌─ rows that come ─────────────────┐
rollout ─> rewards ┤                                  ├─> update_policy
                   └─> replayed: the last 1,024 rows ─┘
                         a draw of them: by priority, less with age
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import joined, taken
from rlgraph.nodes.support.splitmix import WEYL, mix, shift, signed
from rlgraph.ops import Context, float32, int64, op, samples
from rlgraph.ops.output_record import with_columns

CAME, NUMBER, PRIORITY = "the iteration", "the number", "the priority"  # columns that no graph can name


class Given(NamedTuple):
    """The facts about each row beside the columns that it came with."""

    age: int64[samples]


@op(
    makes="samples",
    rows="all",
    holds=True,
    roles={"rows": "batch", "capacity": "capacity", "fresh": "fresh", "oldest": "staleness"},
)
def replay(
    ctx: Context,
    priority: float32[samples] | None,
    *,
    capacity: Annotated[int, Field(ge=1)],
    staleness: Annotated[int, Field(ge=0)],
    batch: Annotated[int, Field(ge=1)] | None = None,
    fresh: bool = False,
    order: Literal["random", "newest"] = "random",
    exponent: Annotated[float, Field(ge=0)] = 1.0,
    half_life: Annotated[float, Field(gt=0)] | None = None,
) -> Given:
    """Some of the last ``capacity`` rows that came, whole: with all columns that are read of them.

    The oldest go first. Of the rest ``batch`` are drawn, none twice, row i with the weight (|p_i| +
    1e-6)^exponent 2^(-age_i / half_life), p_i its ``priority`` when it came, 1 without such a column:
    prioritised replay (arXiv 1511.05952) with the decay by age of arXiv 2604.16918, whose tau is
    half_life / ln 2. A draw takes the largest log(u_i) / weight (Efraimidis and Spirakis 2006, doi
    10.1016/j.ipl.2005.11.003), u_i of (seed, iteration, number of the row): it is the same on any number of
    devices. Records ``held``, the rows that stay, and ``age`` and ``age_max`` of those that are given.

    Attributes:
        capacity: the most rows that stay from one iteration to the next.
        staleness: the most iterations after the one in which it came that a row is given.
        batch: how many rows are given, or as many as there are; null: all.
        fresh: whether rows are given in the iteration in which they come; else from the next on.
        order: ``newest`` takes the rows that came last, without chance.
        exponent: what the priority is raised to; 0: all rows alike.
        half_life: iterations in which the weight of a row halves; null: it stays.

    Example:
        replayed: {op: replay, rows: rollout, capacity: 1024, staleness: 8, batch: 128, half_life: 2}
    """
    rows = _with_rows(ctx, priority)
    if not rows:
        return Given(age=torch.empty(0, dtype=torch.int64))
    age = ctx.iteration - rows[CAME]
    stay = (age < staleness).nonzero()[:, 0][-capacity:]
    youngest = 0 if fresh else 1
    allowed = (age <= staleness) & (age >= youngest)
    if fresh:
        beyond_capacity = max(len(age) - capacity, 0)
        allowed[:beyond_capacity] = False
    places = allowed.nonzero()[:, 0]
    if order == "random" and batch and batch < len(places):
        weight = (rows[PRIORITY][places].double().abs() + 1e-6) ** exponent
        if half_life:
            weight = weight * 0.5 ** (age[places] / half_life)
        keys = _uniform(ctx, rows[NUMBER][places]).log() / weight
        places = places[keys.topk(batch).indices.sort().values]
    if batch and len(places):
        places = places[-batch:]
    ctx.held = {name: taken(column, stay) for name, column in rows.items()}
    ctx.record("held", len(stay), over="iterations")
    if len(places):
        ctx.record("age", age[places])
        ctx.record("age_max", age[places], kind="max")
    columns = {}
    for name, column in rows.items():
        if name not in (CAME, NUMBER, PRIORITY):
            columns[name] = taken(column, places)
    return with_columns(Given(age=age[places]), columns)


def _with_rows(ctx: Context, priority: torch.Tensor | None) -> Mapping[str, Any]:
    """Return the columns of the rows that are held, and behind them those that came."""
    if not ctx.given:
        return ctx.held
    count = len(next(iter(ctx.given.values())))
    next_number = 0
    if ctx.held and len(ctx.held[NUMBER]):
        next_number = int(ctx.held[NUMBER][-1]) + 1
    new = {
        **ctx.given,
        CAME: torch.full((count,), ctx.iteration),
        NUMBER: next_number + torch.arange(count),
        PRIORITY: torch.ones(count) if priority is None else priority,
    }
    if not ctx.held:
        return new
    return {name: joined([ctx.held[name], column]) for name, column in new.items()}


def _uniform(ctx: Context, number: torch.Tensor) -> torch.Tensor:
    """Return float64 in (0, 1) for the number of each row."""
    start = mix(torch.tensor([signed(ctx.seed * 2**32 + ctx.iteration)]))
    return (shift(mix(start + (number + 1) * WEYL), 12).double() + 0.5) / 2**52
