"""Values that files and plans write as text, and that are read once, where they come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError, ValidationInfo, field_validator
from pydantic_core import CoreSchema, core_schema

from rlgraph.variables import REFERENCE, with_values


class TextValue(str):
    """A text that has a form: its parts are attributes, and it equals, prints and is saved as the text."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a value as it prints.

        Raises:
            ValueError: it has another form.
        """
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.parse, core_schema.str_schema())

    def __reduce__(self) -> Any:
        return type(self).parse, (str(self),)


class Referring(BaseModel):
    """A record whose texts may refer to the environment, as ``${env:NAME}``.

    A value is checked with what the variable holds. The reference stays where a text is asked for; where one
    of several words is, the word takes its place.
    """

    @field_validator("*", mode="wrap")
    @classmethod
    def _refer(cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """Check a field; with a context, take what holds a reference or that text as it is."""
        try:
            return check(value)
        except ValidationError as error:
            kinds = {item["type"] for item in error.errors(include_url=False)}
        if info.context:
            text = repr(value)
            if info.context in text or REFERENCE.search(text):
                return value
        typed = check(with_values(value))  # which raises where the variable's value is wrong, too
        is_text_wanted = all(kind.startswith("string_") for kind in kinds)
        return value if is_text_wanted else typed
