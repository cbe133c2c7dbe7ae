"""The filter that ``rows: {by: COLUMN, is: VALUE}`` at a node stands for; graphs do not name it."""

from rlgraph.errors import RunError
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, boolean, op, samples, text

RouteValue = str | int | bool


class RouteError(RunError):
    """A row that no route takes."""


@op(filters=True)
def route(
    ctx: Context,
    by: text[samples],
    *,
    column: str,
    values: list[RouteValue],
    rest: bool = False,
    taken: list[RouteValue] | None = None,
) -> boolean[samples]:
    """Keep the rows whose value is one of ``values``; with ``rest`` the others.

    ``by`` may be of int64 or boolean as well, one value per row.

    Raises:
        RouteError: a value that is none of ``taken``, where readers merge all rows.

    Attributes:
        column: the name of ``by`` in the graph, for the message.
        values: those that are on this route, or with ``rest`` on the others.
        rest: whether the rows with other values stay.
        taken: the values that the routes take together; null: all that there are.
    """
    row_values = by if isinstance(by, list) else by.tolist()
    for row, value in zip(ctx.rows, row_values, strict=True):
        if taken is not None and value not in taken:
            law = f"row {row} has {column} {value!r}, which no node takes that has rows by {column}: "
            law += f"they take {', '.join(map(repr, taken))}"
            remedy = f"give one of them `rows: {{by: {column}}}` without `is`: it takes the rest"
            raise RouteError(f"{law}\n  {remedy}")
    is_listed = torch.tensor([value in values for value in row_values], dtype=torch.bool)
    return ~is_listed if rest else is_listed
