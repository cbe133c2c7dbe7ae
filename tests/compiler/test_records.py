"""Records behave as what `dataclasses.dataclass` makes of the same classes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from rlgraph.records import dataclass


class Fields:
    """The fields of both classes below; each gets an own copy of the annotations."""

    name: str
    sizes: tuple[int, ...] = (1, 2)
    settings: dict[str, int] = dataclasses.field(default_factory=dict)
    place: int = dataclasses.field(default=0, kw_only=True)


def class_of_fields() -> type:
    body = {name: value for name, value in vars(Fields).items() if name not in ("__dict__", "__weakref__")}
    return type("Fields", (), body)


RECORD: Any = dataclass(frozen=True)(class_of_fields())
STANDARD: Any = dataclasses.dataclass(frozen=True)(class_of_fields())


@dataclass(frozen=True)
class Size:
    rows: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Deep:
    sizes: tuple[Size, ...]
    count: int = 1


@dataclass(frozen=True)
class Nothing:
    """A record without fields."""


@dataclass(frozen=True)
class NamedSize(Size):
    name: str = "none"


@dataclass(frozen=True)
class CaseInsensitive:
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaseInsensitive) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())

    def __repr__(self) -> str:
        return f"<{self.text}>"


def test_a_record_has_the_constructor_of_a_dataclass() -> None:
    assert str(inspect.signature(RECORD)) == str(inspect.signature(STANDARD))
    assert RECORD.__match_args__ == STANDARD.__match_args__
    assert dataclasses.is_dataclass(RECORD)
    for arguments, named in [
        (("a",), {}),
        (("a", (3,)), {"place": 2}),
        (("a", (3,), {"b": 1}), {}),
        ((), {"name": "c", "settings": {"d": 2}}),
    ]:
        assert vars(RECORD(*arguments, **named)) == vars(STANDARD(*arguments, **named))
        assert repr(RECORD(*arguments, **named)) == repr(STANDARD(*arguments, **named))
    for arguments, named in [((), {}), (("a", (3,), {}, 4), {}), (("a",), {"other": 1})]:
        with pytest.raises(TypeError) as standard:
            STANDARD(*arguments, **named)
        with pytest.raises(TypeError) as record:
            RECORD(*arguments, **named)
        assert str(record.value) == str(standard.value)
    assert RECORD("a").settings is not RECORD("b").settings


def test_records_are_equal_by_their_fields() -> None:
    assert Size(1, "a") == Size(1, "a") != Size(2, "a")
    assert hash(Size(1, "a")) == hash((1, "a")) == hash(Size(1, "a"))
    assert Size(1) != NamedSize(1)
    assert Deep(sizes=(Size(1),)) in {Deep(sizes=(Size(1),))}
    assert Nothing() == Nothing()
    assert {Nothing(), Nothing()} == {Nothing()}
    assert repr(Nothing()) == "Nothing()"


def test_a_record_does_not_change() -> None:
    for record in (Size(1), NamedSize(1, name="a")):
        for name in ("rows", "unknown"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            del record.rows  # type: ignore[misc]
    with pytest.raises(AssertionError):
        dataclass(frozen=False)


def test_a_record_is_copied_and_replaced() -> None:
    deep = Deep(sizes=(Size(1, "a"),), count=3)
    assert pickle.loads(pickle.dumps(deep)) == copy.deepcopy(deep) == copy.copy(deep) == deep
    assert dataclasses.replace(deep, count=4) == Deep(sizes=(Size(1, "a"),), count=4)
    assert dataclasses.asdict(deep) == {"sizes": ({"rows": 1, "note": "a"},), "count": 3}
    assert NamedSize(1, name="a") == NamedSize(1, "", "a")


def test_a_standard_dataclass_may_extend_a_record() -> None:
    @dataclasses.dataclass(frozen=True)
    class Extended(Size):
        more: int = 0

    assert Extended(1, more=2) == Extended(1, "", 2)
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(type("Changing", (Size,), {"__annotations__": {"more": "int"}}))


def test_a_record_keeps_the_methods_of_its_class() -> None:
    assert CaseInsensitive("A") == CaseInsensitive("a")
    assert {CaseInsensitive("A"), CaseInsensitive("a")} == {CaseInsensitive("A")}
    assert repr(CaseInsensitive("A")) == "<A>"
