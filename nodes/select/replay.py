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
    """A replay buffer: some of the last ``capacity`` rows, with every column of them that is read.

    The oldest rows are dropped first. From the rest, ``batch`` rows are drawn without replacement, row i with
    the weight (|p_i| + 1e-6)^exponent 2^(-age_i / half_life), where p_i is its ``priority`` when it was
    added, 1 without that column: prioritised replay (arXiv 1511.05952) with the decay by age of arXiv
    2604.16918, whose tau is half_life / ln 2. A draw takes the largest log(u_i) / weight (Efraimidis and
    Spirakis 2006, doi 10.1016/j.ipl.2005.11.003), with u_i from (seed, iteration, number of the row), so it
    is the same on any number of devices. Records ``held``, the rows in the buffer, and ``age`` and
    ``age_max`` of the drawn rows.

    Attributes:
        capacity: the most rows that are kept from one iteration to the next.
        staleness: a row is drawn at most this many iterations after the one that added it.
        batch: how many rows to draw, or all if there are fewer; null: all.
        fresh: whether rows can be drawn in the iteration that adds them; false: from the next one on.
        order: ``newest`` takes the rows added last, without randomness.
        exponent: the power to which the priority is raised; 0: all rows are equal.
        half_life: iterations in which the weight of a row halves; null: it does not change.

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
