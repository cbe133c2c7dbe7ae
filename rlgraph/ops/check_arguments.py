"""Checks the arguments of ``@op`` when a function is declared, by the types of ``Declaration``'s fields."""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlgraph.errors import nearest
from rlgraph.ops.op_error import OpError

LEAST = {"of_each": 1, "leaves": 0}  # the smallest value of each argument that is a whole number


def checked_arguments(record: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``@op``, with tuples in place of lists.

    Args:
        record: the dataclass that they make.
        arguments: by name.

    Raises:
        OpError: there is no argument of a name, or an argument does not take its value.
    """
    hints = typing.get_type_hints(record)
    known = [field.name for field in fields(record)]
    checked = {}
    for name, value in arguments.items():
        if name not in known:
            raise OpError(f"@op has no argument `{name}`", known, nearest(name, known), argument=name)
        checked[name] = _checked_value(name, value, _without_none(hints[name], value))
    return checked


def _without_none(hint: Any, value: Any) -> Any:
    """Return the type that a value has to have, where the hint may allow None beside it."""
    if not isinstance(hint, types.UnionType):
        return hint
    if value is None:
        return types.NoneType
    return next(member for member in typing.get_args(hint) if member is not types.NoneType)


def _checked_value(name: str, value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _checked_names(name, value, typing.get_args(kind)[0])
    if origin is Mapping:
        return _checked_mapping(name, value, *typing.get_args(kind))
    if origin is typing.Literal:
        _check_choice(name, f"`{name}` of @op", value, kind)
    elif origin is Callable:
        _require(callable(value), name, value, f"be a function, as {name}=load_rows")
    elif kind is int:
        is_in_range = type(value) is int and value >= LEAST[name]
        _require(is_in_range, name, value, f"be a whole number, at least {LEAST[name]}")
    elif kind is bool:
        _require(type(value) is bool, name, value, "be True or False")
    elif kind is str:
        _require(isinstance(value, str), name, value, "be a name, as a text")
    return value


def _checked_names(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    """Return several names as a tuple; one text is not several, though Python reads it as its letters."""
    if isinstance(value, str):
        law = f"`{name}` of @op must be a tuple of names; it is the text {value!r}"
        raise OpError(law, remedy=f"write {name}=({value!r},)", argument=name)
    is_several = isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
    _require(is_several, name, value, "be a tuple of names")
    for item in value:
        if typing.get_origin(kind) is typing.Literal:
            _check_choice(name, f"a name in `{name}` of @op", item, kind)
    return tuple(value)


def _checked_mapping(name: str, value: Any, key_kind: Any, value_kind: Any) -> Any:
    is_mapping = isinstance(value, Mapping)
    _require(is_mapping, name, value, "be a dict of texts by text")
    for key, item in value.items():
        for text in (key, item):
            _require(isinstance(text, str), name, value, "be a dict of texts by text")
        if typing.get_origin(key_kind) is typing.Literal:
            _check_choice(name, f"a key of `{name}` of @op", key, key_kind)
        if typing.get_origin(value_kind) is typing.Literal:
            _check_choice(name, f"`{name}[{key!r}]` of @op", item, value_kind)
    return value


def _check_choice(name: str, subject: str, value: Any, kind: Any) -> None:
    choices = typing.get_args(kind)
    if value in choices:
        return
    accepted = [choice or '""' for choice in choices]
    remedy = nearest(value, accepted) if isinstance(value, str) else ""
    raise OpError(f"{subject} can't be {value!r}", accepted, remedy, argument=name)


def _require(holds: bool, name: str, value: Any, requirement: str) -> None:
    if not holds:
        raise OpError(f"`{name}` of @op must {requirement}; it is {value!r}", argument=name)
