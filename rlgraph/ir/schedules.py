"""The course of a number over the iterations, where a graph gives one in place of a value.

    kl_coef: {linear: [0.1, 0.0], over: 100}             0.1 in iteration 1, 0 from 101 on
    kl_coef: {cosine: [0.1, 0.0], over: 100, from: 50}   0.1 up to iteration 50, 0 from 150 on
    kl_coef: {steps: {1: 0.1, 50: 0.05}}                 0.1, and from iteration 50 on 0.05

Iterations count from 1, as in metrics.jsonl. A number that follows what is measured is a ``Controller``.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlgraph.errors import GraphError, Mark, Problem, fail
from rlgraph.ir.kl_controller import Controller, read_controller
from rlgraph.syntax.model_settings import Optimizer
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import Binder, validate

Shape = Literal["linear", "cosine", "steps"]
SHAPES: tuple[Shape, ...] = ("linear", "cosine", "steps")
EXAMPLE = "{linear: [0.1, 0.0], over: 100} or {steps: {1: 0.1, 50: 0.05}}"
NumberPlace = tuple[str, ...]  # an attribute, or one and a name in it
MEASURED = "an op of your own says it by @op(measures={'kl_coef': 'kl_ref'})"


@dataclass(frozen=True)
class ValueSchedule:
    """Values at some iterations, ascending; between two of them as ``shape`` says.

    Example:
        >>> fall = ValueSchedule("linear", ((1, 0.1), (101, 0.0)))
        >>> fall.at(1), round(fall.at(51), 6), fall.at(500), fall.most
        (0.1, 0.05, 0.0, 0.1)
    """

    shape: Shape
    points: tuple[tuple[int, int | float], ...]

    def at(self, iteration: int) -> int | float:
        """Return the value in an iteration; before the first point it is that of the first."""
        start, value = self.points[0]
        if iteration <= start:
            return value
        for end, next_value in self.points[1:]:
            if iteration < end:
                return self._between(value, next_value, (iteration - start) / (end - start))
            start, value = end, next_value
        return value

    def _between(self, value: int | float, next_value: int | float, share: float) -> int | float:
        """Return the value at a share of the way from one point to the next."""
        if self.shape == "steps":
            return value
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return value + (next_value - value) * share

    @property
    def most(self) -> int | float:
        """Return the value furthest from 0, which the plan is made for."""
        return max((value for _, value in self.points), key=abs)

    def __str__(self) -> str:
        (start, value), *later = self.points
        if self.shape == "steps":
            changes = [f"{changed} from iteration {iteration}" for iteration, changed in later]
            return ", ".join([str(value), *changes])
        ((end, final),) = later
        since = f" from iteration {start} on" if start > 1 else ""
        return f"{value} to {final} over {end - start} iterations{since}, {self.shape}"


Varying = ValueSchedule | Controller


def rate_course(tree: Tree, path: str, binder: Binder) -> tuple[Tree, ValueSchedule | None]:
    """Return a model with one learning rate in place of its course, and that course."""
    optimizer = tree.get("optimizer")
    if optimizer is None or not optimizer.is_map:
        return tree, None
    fixed = {name for name in Optimizer.model_fields if name != "lr"}
    settled, courses = take_courses(Optimizer, optimizer, f"{path}.optimizer", binder, "", fixed, {})
    rate, schedule = courses.get("lr"), optimizer.get("schedule")
    if courses and schedule and schedule.value != "constant":
        law = f"`{path}.optimizer` has an `lr` that changes, and `schedule: {schedule.value}`"
        binder.problem("course", law, schedule.key, remedy="remove one of the two")
    return tree.with_item("optimizer", settled), rate if isinstance(rate, ValueSchedule) else None


def take_courses(
    record: type[BaseModel],
    tree: Tree,
    path: str,
    binder: Binder,
    what: str,
    fixed: Collection[str],
    measures: Mapping[str, str],
) -> tuple[Tree, dict[str, Varying]]:
    """Return a record's values with one number for each that has a course or a controller, and those.

    Args:
        record: what the values are.
        tree: as they were given, and ``path``, how the graph calls them.
        binder: where problems are noted: a course that is none, or one of its values that is not accepted.
        what: the name of the reader of the values, as ``op rollout``.
        fixed: what is one number for the whole run.
        measures: of what may be adaptive, the metric that it follows.
    """
    courses: dict[str, Varying] = {}
    changes: dict[NumberPlace, tuple[ValueSchedule, list[Tree]]] = {}
    known = f"of this op {', '.join(measures)} may be" if measures else MEASURED
    for place, kinds in _numbers(record, tree):
        item, name = tree.at(place), ".".join(place)
        if item.items.keys().isdisjoint((*SHAPES, "adaptive")):
            continue
        course: tuple[Varying, list[Tree]] | None
        if "adaptive" in item.items:
            follows, remedy = measures.get(name), f"as {EXAMPLE}; {known}"
            course = binder.attempt(read_controller, item, f"{path}.{name}", follows, remedy)
        else:
            course = binder.attempt(_course, item, f"{path}.{name}", kinds, name in fixed)
        if course is None:
            tree = _with(tree, place, replace(item, value=OPEN))
            continue
        varying, leaves = course
        courses[name] = varying
        tree = _with(tree, place, max(leaves, key=lambda leaf: abs(leaf.value)))
        if isinstance(varying, ValueSchedule):
            changes[place] = varying, leaves
    binder.problems += _problems_on_the_way(record, tree, changes, path, what)
    return tree, courses


def _numbers(record: type[BaseModel], tree: Tree) -> Iterator[tuple[NumberPlace, set[Any]]]:
    """Yield the place and the classes of each number: an attribute, or what one has for a name."""
    for name, field in record.model_fields.items():
        item = tree.get(name)
        if not item:
            continue
        kinds = set(_kinds(field.annotation))
        kinds_in_mapping: set[Any] = set()
        for _, value in _maps(field.annotation):
            kinds_in_mapping.update(_kinds(value))
        if kinds & {int, float}:
            yield (name,), kinds
        elif kinds_in_mapping and kinds_in_mapping <= {int, float}:
            if _is_course_of_lists(item):
                yield (name,), set()
            else:
                for key in item.items:
                    yield (name, key), kinds_in_mapping


def _is_course_of_lists(item: Tree) -> bool:
    """Return whether a mapping of numbers is written as if it were one number with a course."""
    return any(shape in SHAPES and isinstance(value.value, list) for shape, value in item.items.items())


def _with(tree: Tree, place: NumberPlace, leaf: Tree) -> Tree:
    name, *inner = place
    return tree.with_item(name, _with(tree.items[name], tuple(inner), leaf) if inner else leaf)


def _problems_on_the_way(
    record: type[BaseModel],
    tree: Tree,
    changes: Mapping[NumberPlace, tuple[ValueSchedule, list[Tree]]],
    path: str,
    what: str,
) -> Iterator[Problem]:
    """Yield the problems that a record has where a course begins, ends or steps, and not as ``tree``."""
    binder = Binder()
    validate(record, tree, path, binder, what)
    reported = {problem.mark for problem in binder.problems}
    written = {leaf.mark for _, leaves in changes.values() for leaf in leaves}
    starts = {start for course, _ in changes.values() for start, _ in course.points}
    for iteration in sorted(starts):
        changed, binder = tree, Binder()
        for place, (course, leaves) in changes.items():
            leaf = _leaf_at(course, leaves, iteration)
            changed = _with(changed, place, replace(leaf, value=course.at(iteration)))
        validate(record, changed, path, binder, what)
        for problem in binder.problems:
            if problem.mark not in reported:
                when = "" if problem.mark in written else f" in iteration {iteration}"
                yield replace(problem, law=problem.law + when)
                reported.add(problem.mark)


def _leaf_at(course: ValueSchedule, leaves: list[Tree], iteration: int) -> Tree:
    """Return where the value is written that a course has reached in an iteration, or begins with."""
    reached = leaves[0]
    for (start, _), leaf in zip(course.points, leaves, strict=True):
        if start <= iteration:
            reached = leaf
    return reached


def _course(item: Tree, path: str, kinds: Collection[Any], fixed: bool) -> tuple[Varying, list[Tree]] | None:
    """Return a course and its numbers, or None while one of them is open; ``kinds`` are the number's."""
    shape, mark = next(shape for shape in SHAPES if shape in item.items), item.key or item.mark
    if not kinds:
        law = f"`{path}` has no course: each of the numbers that it names may have one"
        raise fail("course", law, mark, remedy="as {easy: {linear: [1, 0], over: 100}, hard: 1}")
    if fixed:
        raise fail("course", f"`{path}` is one number for the whole run", mark)
    if shape != "steps" and float not in kinds:
        law = f"`{path}` is a whole number, and changes in steps alone"
        raise fail("course", law, mark, remedy="as {steps: {1: 1024, 200: 2048}}")
    for name, other in item.items.items():
        if name != shape and (shape == "steps" or name not in ("over", "from")):
            raise _wrong(f"`{path}` changes by `{shape}`, beside which there is no `{name}`", other.key)
    if any(leaf.value == OPEN for _, leaf in item.walk()):
        return None
    leaves = _steps(item.items[shape], path) if shape == "steps" else _ramp(item, shape, path)
    return ValueSchedule(shape, tuple((at, leaf.value) for at, leaf in leaves)), [leaf for _, leaf in leaves]


def _steps(values: Tree, path: str) -> list[tuple[int, Tree]]:
    steps = values.items.items()
    if not steps or not all(at.isdecimal() and leaf.is_number for at, leaf in steps):
        raise _wrong(f"`{path}` has steps, which are `iteration: value`", values.mark)
    leaves = {int(at): leaf for at, leaf in steps}
    if min(leaves) > 1:
        raise _wrong(f"`{path}` has steps, and none of them is for iteration 1", values.mark)
    return sorted(leaves.items())


def _ramp(item: Tree, shape: str, path: str) -> list[tuple[int, Tree]]:
    values, over, start = item.items[shape], item.get("over"), item.get("from")
    ends = values.value if isinstance(values.value, list) else []
    if len(ends) != 2 or not all(end.is_number for end in ends):
        raise _wrong(f"`{path}` changes by `{shape}` from one number to another", values.mark)
    if not (over and over.is_count and (start is None or start.is_count)):
        raise _wrong(f"`{path}` changes `over` a number of iterations, 1 or more", (over or item).mark)
    first = int(start.value) if start else 1
    return [(first, ends[0]), (first + int(over.value), ends[1])]


def _wrong(law: str, mark: Mark | None) -> GraphError:
    return fail("course", law, mark, remedy=f"as {EXAMPLE}")


def _maps(annotation: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each ``dict`` in an annotation that is no part of another."""
    if get_origin(annotation) is dict:
        yield get_args(annotation)
    elif get_origin(annotation) not in (Literal, list):
        for part in get_args(annotation):
            yield from _maps(part)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the classes in an annotation: ``float`` of ``Annotated[float, ...] | None``."""
    if isinstance(annotation, type):
        yield annotation
    elif get_origin(annotation) is not Literal and get_origin(annotation) not in (list, dict):
        for part in get_args(annotation):
            yield from _kinds(part)
