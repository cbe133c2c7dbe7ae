"""Frozen dataclasses that are quick to import.

``dataclasses.dataclass`` writes six methods for each class as text, which Python compiles at every start: a
seventh of the instructions of ``rlgraph check``. Here one of them is compiled, ``__init__``; the others are
functions that all records share, or closures over a getter of their fields. To whoever uses a record,
and to mypy, it is a dataclass as any other.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from dataclasses import dataclass as standard_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # so that mypy knows the fields and the constructor
else:

    def dataclass(*, frozen: bool, kw_only: bool = False) -> Callable[[type], type]:
        """Make a class a frozen dataclass, in place of ``dataclasses.dataclass``.

        Records that change or have an order are made by that one, and so is a record that extends another.

        Example:
            >>> @dataclass(frozen=True)
            ... class Size:
            ...     rows: int
            ...     columns: int = 2
            >>> Size(3), Size(3) == Size(3, 2), hash(Size(3)) == hash(Size(3, 2))
            (Size(rows=3, columns=2), True, True)
        """
        assert frozen, "a record that changes is made by dataclasses.dataclass"

        def make_record(cls: type) -> type:
            if is_dataclass(cls):
                return standard_dataclass(frozen=True, kw_only=kw_only)(cls)
            # frozen=True would compile two of the methods; it is noted after, for the sake of subclasses
            standard_dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            cls.__dataclass_params__.frozen = True
            for name, method in _methods(cls).items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            return cls

        return make_record


class _Factory:
    """The default of a parameter whose value a function makes, in signatures as a dataclass has it."""

    def __repr__(self) -> str:
        return "<factory>"


FACTORY = _Factory()


def _methods(cls: type) -> dict[str, Any]:
    """Return the methods of a record, without those that its class may define itself."""
    values = _values_of(cls)

    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    def __hash__(self: Any) -> int:
        return hash(values(self))

    methods = {"__init__": _constructor(cls), "__eq__": __eq__, "__hash__": __hash__, "__repr__": _repr}
    if "__eq__" in vars(cls):
        del methods["__hash__"]
    return methods | {"__setattr__": _refuse_setting, "__delattr__": _refuse_deleting}


def _values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function from a record to the values of its fields."""
    names = [field.name for field in fields(cls)]
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
    return f"{type(self).__qualname__}({values})"


def _refuse_setting(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deleting(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _constructor(cls: type) -> Any:
    """Compile ``__init__``, with a parameter for each field and its default."""
    known = {"__name__": cls.__module__, "set_field": object.__setattr__, "FACTORY": FACTORY}
    parameters = list[str]()
    body = list[str]()
    for field in sorted(fields(cls), key=operator.attrgetter("kw_only")):
        if field.kw_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(field.name + _default(field, known))
        value = field.name
        if field.default_factory is not MISSING:
            value = f"make_{field.name}() if {field.name} is FACTORY else {field.name}"
        body.append(f" set_field(self, {field.name!r}, {value})")
    text = f"def __init__(self, {', '.join(parameters)}):\n" + "\n".join(body or [" pass"])
    exec(text, known)
    constructor: Any = known["__init__"]
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    constructor.__annotations__ = {field.name: field.type for field in fields(cls)} | {"return": None}
    return constructor


def _default(field: Field[Any], known: dict[str, Any]) -> str:
    """Return the default of a field's parameter as text, after adding what this names to ``known``."""
    if field.default_factory is not MISSING:
        known[f"make_{field.name}"] = field.default_factory
        return "=FACTORY"
    if field.default is not MISSING:
        known[f"default_{field.name}"] = field.default
        return f"=default_{field.name}"
    return ""
