"""Attributes that several ops share stand in one group, and in graphs among an op's other attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from rlgraph.nodes import OPS
from rlgraph.ops import float32, op, samples
from rlgraph.ops.attribute_group import AttributeGroup
from rlgraph.ops.op_error import OpError
from rlgraph.ops.registry import load
from rlgraph.ops.signature import signature


@dataclass(frozen=True, kw_only=True)
class Shape(AttributeGroup):
    """The shape of a bonus.

    Attributes:
        limit: the largest bonus, above 0.
        steps: where it changes.
    """

    limit: Annotated[float, Field(gt=0)]
    steps: list[int] = field(default_factory=list)


@op()
def bonus(rewards: float32[samples], *, scale: float = 1.0, shape: Shape) -> float32[samples]:
    """Add a bonus.

    Attributes:
        scale: what rewards are multiplied by.
        steps: where the bonus changes, in tokens.
    """
    return rewards * scale + shape.limit


def test_an_op_takes_a_group_whose_fields_are_its_attributes() -> None:
    declared = signature("bonus", bonus)
    assert [*declared.attributes.model_fields] == ["scale", "limit", "steps"]
    attributes = dict(declared.attributes(limit=0.5))
    assert attributes == {"scale": 1.0, "limit": 0.5, "steps": []}
    assert declared.arguments(attributes) == {"scale": 1.0, "shape": Shape(limit=0.5)}
    with pytest.raises(ValidationError, match="limit"):
        declared.attributes(limit=0.0)
    with pytest.raises(ValidationError, match="limit"):
        declared.attributes()


def test_a_group_documents_its_attributes_unless_the_op_does() -> None:
    assert signature("bonus", bonus).docstring().attributes == {
        "scale": "what rewards are multiplied by.",
        "limit": "the largest bonus, above 0.",
        "steps": "where the bonus changes, in tokens.",
    }


def test_a_name_stands_for_one_attribute() -> None:
    def twice(rewards: float32[samples], *, limit: float, shape: Shape) -> float32[samples]: ...  # type: ignore[empty-body]

    with pytest.raises(OpError, match="two of its attributes are called limit"):
        signature("twice", twice)


def test_rollouts_are_sampled_by_the_same_attributes() -> None:
    declared = [load(OPS[name], name) for name in ("rollout", "rollout.partial", "rollout.agent")]
    names = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "min_new_tokens")
    for name in names:
        fields = [each.attributes.model_fields[name] for each in declared]
        assert fields[0].annotation == fields[1].annotation == fields[2].annotation
        assert fields[0].default == fields[1].default == fields[2].default
    assert all(each.groups for each in declared)
