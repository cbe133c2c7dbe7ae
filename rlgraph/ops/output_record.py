"""The record that an op returns where a graph names columns beside those that its signature declares."""

from collections.abc import Mapping
from typing import Any, TypeVar

OutputRecord = TypeVar("OutputRecord", bound=tuple[Any, ...])


def with_columns(record: OutputRecord, columns: Mapping[str, Any]) -> OutputRecord:
    """Return a NamedTuple of an op's own columns that has further columns as attributes.

    For ops with ``@op(columns=...)`` or ``@op(holds=True)``, whose graph names more than they declare.

    Raises:
        TypeError: a further column has the name of one of the record's fields.

    Example:
        >>> from typing import NamedTuple
        >>> class Prompts(NamedTuple):
        ...     question: list[str]
        >>> written = with_columns(Prompts(["1 + 1"]), {"level": [3]})
        >>> written.question, written.level
        (['1 + 1'], [3])
    """
    kind = type(record)
    clashes = columns.keys() & set(getattr(kind, "_fields", ()))
    if clashes:
        raise TypeError(f"{kind.__name__} has columns of its own named {', '.join(sorted(clashes))}")
    extensible = type(kind.__name__, (kind,), {})  # unlike a NamedTuple, its subclass takes attributes
    extended: OutputRecord = extensible(*record)
    vars(extended).update(columns)
    return extended
