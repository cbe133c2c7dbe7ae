"""Values that files and plans write as text, and that are read once, where they come in."""

from __future__ import annotations

from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


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

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return type(self).parse, (str(self),)
