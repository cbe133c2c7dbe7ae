"""Column types: what one value that flows between nodes is made of.

A column has a dtype, a *domain* (what it has one row per) and, where its rows differ in length, a *token
axis*. Ops write their types as annotations, and they print the same way:

    rewards: float32[samples]               one number a sample
    tokens: int64[samples, tokens]          ragged: flat values and offsets, no padding
    answer: text[prompts]                   one string a prompt

The lower-case classes below are those annotations. They are never instantiated: an op's body gets a
``torch.Tensor`` for a plain column, a ``rlgraph.nodes.ragged.Ragged`` for one with a token axis, and a list
of ``str`` for text.
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVarTuple

Axes = TypeVarTuple("Axes")


class Domain:
    """An axis that counts rows."""


class prompts(Domain):
    """One row a question of the data."""


class samples(Domain):
    """One row a sequence to train on: ``n`` for each prompt after a rollout."""


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


@dataclass(frozen=True)
class ColumnType:
    """A dtype over a domain, ragged along a token axis or not.

    Example:
        >>> str(ColumnType.of(float32[samples, tokens]))
        'float32[samples, tokens]'
    """

    dtype: str
    domain: str
    axis: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{self.domain}{', ' + self.axis if self.axis else ''}]"

    @staticmethod
    def parse(text: str) -> ColumnType:
        """Read a type as it prints.

        Raises:
            ValueError: it is none.

        Example:
            >>> ColumnType.parse("float32[samples, tokens]").axis
            'tokens'
        """
        found = re.fullmatch(r"(\w+)\[(\w+)(?:, *(\w+))?\]", text.strip())
        dtype, domain, axis = found.groups() if found else ("", "", None)
        domains, axes = ("prompts", "samples"), (None, "tokens", "prompt_tokens")
        if dtype not in DTYPES or domain not in domains or axis not in axes:
            raise ValueError(f"{text!r} is no column type; write for example float32[samples, tokens]")
        return ColumnType(dtype, domain, axis)

    @staticmethod
    def of(annotation: Any) -> ColumnType:
        """Read an annotation such as ``float32[samples, tokens]``.

        Raises:
            TypeError: it is not a column annotation of one domain and at most one token axis.
        """
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        is_column = isinstance(origin, type) and issubclass(origin, Annotation)
        if not (is_column and 1 <= len(args) <= 2 and issubclass(args[0], Domain)):
            raise TypeError(f"{annotation!r} is no column type; write for example float32[samples, tokens]")
        if len(args) == 2 and not issubclass(args[1], TokenAxis):
            raise TypeError(f"{args[1]!r} is no token axis; use tokens or prompt_tokens")
        return ColumnType(origin.__name__, args[0].__name__, args[1].__name__ if len(args) == 2 else None)


def is_column(annotation: Any) -> bool:
    """Whether an annotation is a column type, or a column type or None."""
    origin = typing.get_origin(strip_none(annotation))
    return isinstance(origin, type) and issubclass(origin, Annotation)


def strip_none(annotation: Any) -> Any:
    """``T | None`` as ``T``; anything else as it is."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


class PathMarker:
    """Marks an attribute as a path: relative to the graph file that it stands in."""


File = typing.Annotated[str, PathMarker()]


def holds_paths(*annotations: Any) -> bool:
    """Whether an attribute's type, or the metadata beside it, has a ``File`` in it.

    Example:
        >>> holds_paths(list[File]), holds_paths(list[str])
        (True, False)
    """
    return any(isinstance(part, PathMarker) or holds_paths(*typing.get_args(part)) for part in annotations)
