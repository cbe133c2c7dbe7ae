"""Column types: what one value that flows between nodes is made of.

A column has a dtype, a *domain* (what it has one row per) and, where its rows differ in length, a *token
axis*. Behind them it may have *fixed axes*, each as long in every row: a number, or a name that stands for
one. Ops write their types as annotations, and they print the same way:

    rewards: float32[samples]                    one number per sample
    tokens: int64[samples, tokens]               ragged: flat values and offsets, no padding
    answer: text[prompts]                        one string per prompt
    tests: json[prompts]                         one value of JSON per prompt: a list, a dict, ...
    scores: float32[samples, 3]                  three numbers per sample; ``Literal[3]`` in an annotation
    top: float32[samples, tokens, k]             ``k`` numbers per token: values are ``[all tokens, k]``

A named axis is as long as the attribute of that name says of the op that writes the column; without one,
``layers`` and ``k`` are those of its model: layers with a mixture of experts, and experts per token.

The lower-case classes below are those annotations. They are never instantiated: an op's body gets a
``torch.Tensor`` for a plain column, a ``Ragged`` (nodes/support/ragged.py) for one with a token axis, a list
of ``str`` for text, and of what ``json.loads`` gives for json. mypy knows these types by a plugin
(mypy_plugin.py).
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVarTuple

from rlgraph.text_value import TextValue

Axes = TypeVarTuple("Axes")


class Domain:
    """An axis that counts rows."""

    answered = False  # whether a row has a response behind its prompt
    made_of: str | None = None  # the domain that has fewer rows, of which it is made


class prompts(Domain):
    """One row per question of the data."""


class samples(Domain):
    """One row per sequence to train on: ``n`` for each prompt after a rollout."""

    answered = True
    made_of = "prompts"


class segments(Domain):
    """One row per context that a model saw: any number for each sample."""

    answered = True
    made_of = "samples"


DOMAINS: dict[str, type[Domain]] = {"prompts": prompts, "samples": samples, "segments": segments}


def is_made_of(domain: str, ancestor: str) -> bool:
    """Return whether each row of a domain is made of one of another's, by however many steps."""
    while domain in DOMAINS:
        parent = DOMAINS[domain].made_of
        if parent is None:
            return False
        if parent == ancestor:
            return True
        domain = parent
    return False


class TokenAxis:
    """An axis whose length differs from row to row."""


class tokens(TokenAxis):
    """Prompt and response together, as the model saw them."""


class other_tokens(TokenAxis):
    """Prompt and response as well, of what an op reads beside ``tokens``: they need not be the same ones."""


class prompt_tokens(TokenAxis):
    """The prompt alone, before any response."""


class FixedAxis:
    """An axis that is as long in every row; the subclass's name is an attribute of the op that writes it."""


class layers(FixedAxis):
    """The layers of a model that are mixtures of experts."""


class k(FixedAxis):
    """The largest of many: experts per token of a model, or as many as an attribute ``k`` says."""


class turns(FixedAxis):
    """The turns of a conversation: as many as an attribute ``turns`` says."""


class Annotation(Generic[*Axes]):
    """A column annotation; the subclass names the dtype."""


if TYPE_CHECKING:
    from typing_extensions import TypeAliasType

    # mypy replaces these by the types of the values (mypy_plugin.py); other checkers accept any use of them
    float32 = TypeAliasType("float32", Any, type_params=(Axes,))
    int64 = TypeAliasType("int64", Any, type_params=(Axes,))
    boolean = TypeAliasType("boolean", Any, type_params=(Axes,))
    text = TypeAliasType("text", Any, type_params=(Axes,))
    json = TypeAliasType("json", Any, type_params=(Axes,))
    anything = TypeAliasType("anything", Any, type_params=(Axes,))
else:

    class float32(Annotation[*Axes]): ...

    class int64(Annotation[*Axes]): ...

    class boolean(Annotation[*Axes]): ...

    class text(Annotation[*Axes]): ...

    class json(Annotation[*Axes]): ...

    class anything(Annotation[*Axes]):
        """A column of any dtype, which an op reads."""


TOKEN_AXES = {axis.__name__: axis for axis in (tokens, other_tokens, prompt_tokens)}
AXIS = re.compile(r"[1-9][0-9]*|[^\W0-9]\w*")  # a fixed axis: a number above 0, or a name
DTYPES = {"float32": float32, "int64": int64, "boolean": boolean, "text": text, "json": json}
LISTED = ("text", "json")  # their values are lists of Python objects, which have no token axis and no others


class ColumnType(TextValue):
    """A dtype over a domain, ragged along a token axis or not, with any number of fixed axes behind.

    Example:
        >>> ColumnType.of(float32[samples, tokens])
        'float32[samples, tokens]'
    """

    dtype: str
    domain: str
    axis: str | None
    fixed: tuple[str, ...]  # names, or numbers as they print

    def __new__(cls, dtype: str, domain: str, axis: str | None = None, fixed: Sequence[str] = ()) -> Self:
        axes = [domain, axis, *fixed] if axis else [domain, *fixed]
        column = super().__new__(cls, f"{dtype}[{', '.join(axes)}]")
        column.dtype = dtype
        column.domain = domain
        column.axis = axis
        column.fixed = tuple(fixed)
        return column

    def over(self, domain: str) -> Self:
        """Return the same type with one row per something else.

        Example:
            >>> ColumnType.parse("float32[prompts, 3]").over("samples")
            'float32[samples, 3]'
        """
        return type(self)(self.dtype, domain, self.axis, self.fixed)

    @classmethod
    def parse(cls, text: str, domain: str = "") -> Self:
        """Read a type as it prints, or a dtype alone over ``domain``; a ``ValueError`` where it is neither.

        Example:
            >>> ColumnType.parse("float32[samples, tokens]").axis
            'tokens'
            >>> ColumnType.parse("float32[samples, tokens, k, 2]").fixed
            ('k', '2')
        """
        is_dtype_alone = bool(domain) and text in DTYPES
        written = f"{text}[{domain}]" if is_dtype_alone else text
        match = re.fullmatch(r"(\w+)\[(\w+(?:, *\w+)*)\]", written.strip())
        refusal = ValueError(f"{text!r} is not a column type; write for example float32[samples, tokens]")
        if match is None:
            raise refusal
        dtype = match[1]
        domain, *axes = re.split(r", *", match[2])
        if dtype not in DTYPES or domain not in DOMAINS:
            raise refusal
        if dtype in LISTED and axes:
            raise refusal
        token_axis = None
        if axes and axes[0] in TOKEN_AXES:
            token_axis = axes.pop(0)
        for axis in axes:
            is_reserved = axis in DOMAINS or axis in TOKEN_AXES
            if is_reserved or not AXIS.fullmatch(axis):
                raise refusal
        return cls(dtype, domain, token_axis, axes)

    def cell_bytes(self, sizes: Sequence[int] = (), stored: str = "") -> int | None:
        """Return the bytes per row, or per token where it has a token axis; None where they are not known.

        ``sizes`` are those of its fixed axes; ``stored``, the integers that hold its values, if narrower.

        Example:
            >>> ColumnType.parse("int64[samples, tokens, layers, k]").cell_bytes((48, 8), "int16")
            768
        """
        width = {**BYTES, **NARROW}.get(stored or self.dtype)
        if width is None or len(sizes) != len(self.fixed):
            return None
        return width * math.prod(sizes)

    @staticmethod
    def of(annotation: Any) -> ColumnType:
        """Read an annotation such as ``float32[samples, tokens]``; a ``TypeError`` where it is another."""
        dtype = typing.get_origin(annotation)
        domain, *axes = typing.get_args(annotation) or (None,)
        if not _is_a(dtype, Annotation) or not _is_a(domain, Domain):
            law = f"{annotation!r} is not a column type"
            raise TypeError(f"{law}; write for example float32[samples, tokens]")
        token_axis = None
        if axes and _is_a(axes[0], TokenAxis):
            token_axis = axes.pop(0).__name__
        fixed = [_fixed_axis(axis) for axis in axes]
        has_axes = token_axis is not None or bool(fixed)
        if dtype.__name__ in LISTED and has_axes:
            raise TypeError(f"{annotation!r}: {dtype.__name__} has one value per row, and no further axes")
        return ColumnType(dtype.__name__, domain.__name__, token_axis, fixed)


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _fixed_axis(axis: Any) -> str:
    """Return a fixed axis of an annotation as it prints: its name, or the number of a ``Literal``."""
    if _is_a(axis, FixedAxis):
        return str(axis.__name__)
    number = axis
    if typing.get_origin(axis) is typing.Literal:
        number, *further = typing.get_args(axis)
        if further:
            number = None
    is_length = type(number) is int and number >= 1
    if not is_length:
        law = f"{axis!r} is not an axis: the token axis, tokens or prompt_tokens, comes first"
        raise TypeError(f"{law}; behind it are subclasses of FixedAxis, and numbers as Literal[3]")
    return str(number)


def is_column(annotation: Any) -> bool:
    """Return whether an annotation is a column type, or a column type or None."""
    return _is_a(typing.get_origin(strip_none(annotation)), Annotation)


def strip_none(annotation: Any) -> Any:
    """Return ``T | None`` as ``T``; anything else as it is."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 else annotation


class PathMarker:
    """Marks an attribute as a path: relative to the graph file that it stands in."""


class FunctionMarker:
    """Marks an attribute as a plain function: ``my_rewards.py:name`` or ``package.module:name``."""


File = typing.Annotated[str, PathMarker()]
FileFunction = typing.Annotated[str, FunctionMarker()]  # an op calls it by ``load_function`` (registry.py)


def holds(marker: type, *annotations: Any) -> bool:
    """Return whether an attribute's type, or the metadata beside it, has a marker in it.

    Example:
        >>> holds(PathMarker, list[File]), holds(PathMarker, list[str])
        (True, False)
    """
    for annotation in annotations:
        if isinstance(annotation, marker) or holds(marker, *typing.get_args(annotation)):
            return True
    return False


BYTES = {"float32": 4, "int64": 8, "boolean": 1}  # the bytes of one value in memory
NARROW = {"int8": 1, "int16": 2, "int32": 4}  # in which an int64 column may be stored (``op(stores=...)``)
