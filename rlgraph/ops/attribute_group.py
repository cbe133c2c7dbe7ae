"""Attributes that several ops share, declared and documented once.

    @dataclass(frozen=True)
    class SamplingAttributes(AttributeGroup):
        '''How tokens are drawn.

        Attributes:
            temperature: what the logits are divided by; 0 takes the most likely token.
        '''

        temperature: NonNegativeFloat = 1.0

    @op(makes="samples")
    def rollout(model: ServeEngine, ..., *, n: int = 1, sampling: SamplingAttributes) -> Rollout: ...

In a graph the fields of a group stand among the op's other attributes: ``{op: rollout, temperature: 0.7}``.
"""

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Self

from rlgraph.ops.docstring import read_docstring


@dataclasses.dataclass(frozen=True)
class AttributeGroup:
    """A group of attributes; a subclass is a frozen dataclass, whose fields are the attributes."""

    @classmethod
    def attributes(cls) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name, the annotation and the default of each attribute; ``...`` where it is required."""
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            default: Any = ...
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                default = field.default
            yield field.name, hints[field.name], default

    @classmethod
    def descriptions(cls) -> Mapping[str, str]:
        """Return the description of each attribute in the docstring."""
        return read_docstring(inspect.getdoc(cls) or "").attributes

    @classmethod
    def pop_from(cls, attributes: dict[str, Any]) -> Self:
        """Return the group that some attributes make, which are removed from them."""
        values = {}
        for name, _, _ in cls.attributes():
            if name in attributes:
                values[name] = attributes.pop(name)
        return cls(**values)
