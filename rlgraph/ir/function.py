"""Functions as workers call them: ops and their hooks, with attributes and the names of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from rlgraph.ir.kl_controller import Controller
from rlgraph.ir.schedules import ValueSchedule, Varying
from rlgraph.ops.declare import Role
from rlgraph.records import dataclass


@dataclass(frozen=True)
class Function:
    """An op or a hook as a worker calls it."""

    target: str
    attributes: Mapping[str, Any]
    ins: Mapping[str, str] = field(default_factory=dict)  # parameter -> column
    outs: Mapping[str, str] = field(default_factory=dict)  # the op's name of an output -> column
    handles: Mapping[str, str] = field(default_factory=dict)
    courses: Mapping[str, Varying] = field(default_factory=dict)  # what changes, as kl_coef or weights.easy
    model: str | None = None
    of: str | None = None  # the model whose weights it copies onto its own
    tokenizer: str | None = None
    state: str | None = None  # the node whose state it has, its own or another's
    joins: str = ""  # of an update, the node to whose optimizer steps it adds its loss
    holds: tuple[str, ...] = ()  # of one that holds rows, the parameters by which they come
    hooks: Mapping[str, Function] = field(default_factory=dict)
    roles: Mapping[Role, str] = field(default_factory=dict)  # what an attribute decides for others -> it

    def value(self, role: Role, default: Any = None) -> Any:
        """Return what the attribute says that has a role, or the default."""
        return self.attributes.get(self.roles.get(role, ""), default)

    def at(self, iteration: int, adapted: Mapping[str, float] | None = None) -> Function:
        """Return the same with the attributes that change as they are in an iteration, counted from 1.

        ``adapted`` has those that have a controller; without, they are as in the first iteration.
        """
        values: dict[str, Any] = {}
        for name, schedule in self.schedules.items():
            values[name] = schedule.at(iteration)
        values.update(adapted or {})
        attributes = dict(self.attributes)
        for name, value in values.items():
            attribute, _, key = name.partition(".")
            if key:  # a number of a mapping, as weights.easy
                attributes[attribute] = {**attributes[attribute], key: value}
            else:
                attributes[attribute] = value
        hooks = {attribute: hook.at(iteration) for attribute, hook in self.hooks.items()}
        return replace(self, attributes=attributes, hooks=hooks)

    @property
    def schedules(self) -> dict[str, ValueSchedule]:
        """Return the courses of the attributes that follow the iteration."""
        return {name: course for name, course in self.courses.items() if isinstance(course, ValueSchedule)}

    @property
    def controllers(self) -> dict[str, Controller]:
        """Return the controllers of the attributes that follow what is measured."""
        return {name: course for name, course in self.courses.items() if isinstance(course, Controller)}

    @property
    def varying(self) -> dict[str, Any]:
        """Return the values of the attributes that have a course, those of hooks among them."""
        values: dict[str, Any] = {}
        for hook in self.hooks.values():
            values |= hook.varying
        for name in self.courses:
            attribute, _, key = name.partition(".")
            value = self.attributes[attribute]
            values[name] = value[key] if key else value
        return values
