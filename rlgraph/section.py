"""The base of all sections of a graph: a strict record, and types of its values."""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from rlgraph.text_value import Referring

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Default = TypeVar("Default")
SomeSection = TypeVar("SomeSection", bound="Section")


def option(default: Default, about: str) -> Default:
    """Return a field with a default, and what the reference says of it."""
    return Field(default=default, description=about)


def defaults(section: type[SomeSection]) -> SomeSection:
    """Return a section of defaults as a field's default. It is not validated, for which it would need a
    validator of its own at every start."""
    return section.model_construct()


class Section(Referring):
    """A strict record: no unknown keys, no silent conversions.

    A text below a field describes it in a JSON schema, and is looked for when there is one to write. With
    pydantic's own ``use_attribute_docstrings`` every import would read the source files again. A validator is
    built when it is first needed, too (``defer_build``): most commands need few of them.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), defer_build=True
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for owner in cls.__mro__:
            if not issubclass(owner, Section):
                continue
            for name, text in _field_docstrings(owner).items():
                properties[name].setdefault("description", text)
        return schema


def _field_docstrings(section: type[Section]) -> Mapping[str, str]:
    """Return the text below each field of a section that has one."""
    file = inspect.getsourcefile(section)
    assert file, f"{section} has no source"
    texts = {}
    for statement, following in pairwise(_class_bodies(file)[section.__qualname__]):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


@cache
def _class_bodies(file: str) -> Mapping[str, list[ast.stmt]]:
    """Return the statements of each class at the top level of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    bodies = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            bodies[statement.name] = statement.body
    return bodies
