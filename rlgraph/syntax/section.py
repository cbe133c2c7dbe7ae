"""What the sections of a graph are made of: strict records, and types of their values."""

from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field

from rlgraph.text_value import Referring

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Default = TypeVar("Default")


def option(default: Default, about: str) -> Default:
    """Return a field with a default, and what the reference says of it."""
    return Field(default=default, description=about)


class Section(Referring):
    """A strict record: no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )
