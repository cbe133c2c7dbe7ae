"""Column types: what one value that flows between nodes is made of.

A column has a dtype, a *domain* (what it has one row per) and, where its rows differ in length, a *token
axis*. Ops write their types as annotations, and they print the same way:

    rewards: float32[samples]               one number per sample
    tokens: int64[samples, tokens]          ragged: flat values and offsets, no padding
    answer: text[prompts]                   one string per prompt

The lower-case classes below are those annotations. They are never instantiated: an op's body gets a
``torch.Tensor`` for a plain column, a ``Ragged`` (nodes/support/ragged.py) for one with a token axis, and a
list of ``str`` for text.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Generic, Self, TypeVarTuple

from rlgraph.text_value import TextValue

Axes = TypeVarTuple("Axes")


class Domain:
    """An axis that counts rows."""

    answered = False  # whether a row has a response behind its prompt
    made_of: str | None = None  # the domain that has fewer rows, of which it is made


class prompts(Domain):
    """One row a question of the data."""


class samples(Domain):
    """One row a sequence to train on: ``n`` for each prompt after a rollout."""

    answered, made_of = True, "prompts"


DOMAINS: dict[str, type[Domain]] = {"prompts": prompts, "samples": samples}


def is_made_of(domain: str, other: str) -> bool:
    """Return whether each row of a domain is made of one of another's, by however many steps."""
    above = DOMAINS[domain].made_of if domain in DOMAINS else None
    return above is not None and (above == other or is_made_of(above, other))


class TokenAxis:
    """An axis whose length differs from row to row."""


class tokens(TokenAxis):
    """Prompt and response together, as the model saw them."""


class prompt_tokens(TokenAxis):
    """The prompt alone, before any response."""


class Annotation(Generic[*Axes]):
    """A column annotation; the subclass names the dtype."""


class float32(Annotation[*Axes]): ...


class int64(Annotation[*Axes]): ...


class boolean(Annotation[*Axes]): ...


class text(Annotation[*Axes]): ...


DTYPES = {"float32": float32, "int64": int64, "boolean": boolean, "text": text}


class ColumnType(TextValue):
    """A dtype over a domain, ragged along a token axis or not.

    Example:
        >>> ColumnType.of(float32[samples, tokens])
        'float32[samples, tokens]'
    """

    dtype: str
    domain: str
    axis: str | None

    def __new__(cls, dtype: str, domain: str, axis: str | None = None) -> Self:
        column = super().__new__(cls, f"{dtype}[{domain}{', ' + axis if axis else ''}]")
        column.dtype, column.domain, column.axis = dtype, domain, axis
        return column

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a type as it prints; a ``ValueError`` where it is none.

        Example:
            >>> ColumnType.parse("float32[samples, tokens]").axis
            'tokens'
        """
        match = re.fullmatch(r"(\w+)\[(\w+)(?:, *(\w+))?\]", text.strip())
        dtype, domain, axis = match.groups() if match else ("", "", None)
        if dtype not in DTYPES or domain not in DOMAINS or axis not in (None, "tokens", "prompt_tokens"):
            raise ValueError(f"{text!r} is no column type; write for example float32[samples, tokens]")
        return cls(dtype, domain, axis)

    @staticmethod
    def of(annotation: Any) -> ColumnType:
        """Read an annotation such as ``float32[samples, tokens]``; a ``TypeError`` where it is none."""
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        is_column = isinstance(origin, type) and issubclass(origin, Annotation)
        if not (is_column and 1 <= len(args) <= 2 and issubclass(args[0], Domain)):
            raise TypeError(f"{annotation!r} is no column type; write for example float32[samples, tokens]")
        if len(args) == 2 and not issubclass(args[1], TokenAxis):
            raise TypeError(f"{args[1]!r} is no token axis; use tokens or prompt_tokens")
        return ColumnType(origin.__name__, args[0].__name__, args[1].__name__ if len(args) == 2 else None)


def is_column(annotation: Any) -> bool:
    """Return whether an annotation is a column type, or a column type or None."""
    origin = typing.get_origin(strip_none(annotation))
    return isinstance(origin, type) and issubclass(origin, Annotation)


def strip_none(annotation: Any) -> Any:
    """Return ``T | None`` as ``T``; anything else as it is."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    rest = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    return rest[0] if is_union and len(rest) == 1 else annotation


class PathMarker:
    """Marks an attribute as a path: relative to the graph file that it stands in."""


File = typing.Annotated[str, PathMarker()]


def holds_paths(*annotations: Any) -> bool:
    """Return whether an attribute's type, or the metadata beside it, has a ``File`` in it.

    Example:
        >>> holds_paths(list[File]), holds_paths(list[str])
        (True, False)
    """
    return any(isinstance(part, PathMarker) or holds_paths(*typing.get_args(part)) for part in annotations)


BYTES = {"float32": 4, "int64": 8, "boolean": 1}  # the bytes of one value in memory
