"""The course of a number over the iterations, where a graph gives one in place of a value.

    kl_coef: {linear: [0.1, 0.0], over: 100}             0.1 in iteration 1, 0 from 101 on
    kl_coef: {cosine: [0.1, 0.0], over: 100, from: 50}   0.1 up to iteration 50, 0 from 150 on
    kl_coef: {steps: {1: 0.1, 50: 0.05}}                 0.1, and from iteration 50 on 0.05

Iterations count from 1, as in metrics.jsonl. A number that follows what is measured is a ``Controller``.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlgraph.errors import GraphError, Mark, Problem, fail
from rlgraph.ir.kl_controller import Controller, read_controller
from rlgraph.records import dataclass
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
    fixed = Optimizer.model_fields.keys() - {"lr"}
    settled, courses = take_courses(Optimizer, optimizer, f"{path}.optimizer", binder, "", fixed, {})
    schedule = optimizer.get("schedule")
    if courses and schedule and schedule.value != "constant":
        law = f"`{path}.optimizer` has an `lr` that changes, and `schedule: {schedule.value}`"
        binder.problem("course", law, schedule.key, remedy="remove one of the two")
    rate = courses.get("lr")
    return tree.with_item("optimizer", settled), rate if isinstance(rate, ValueSchedule) else None


@dataclass(frozen=True)
class _Course:
    """The course of a number as a graph gives it; ``numbers`` are the places of its values, one per point."""

    varying: Varying
    numbers: Sequence[Tree]

    def number_at(self, iteration: int) -> Tree:
        """Return the number that a ``ValueSchedule`` has reached in an iteration, or begins with."""
        assert isinstance(self.varying, ValueSchedule)
        reached = self.numbers[0]
        for (start, _), number in zip(self.varying.points, self.numbers, strict=True):
            if start <= iteration:
                reached = number
        return reached


def take_courses(
    record: type[BaseModel],
    tree: Tree,
    path: str,
    binder: Binder,
    reader: str,
    fixed: Collection[str],
    measures: Mapping[str, str],
) -> tuple[Tree, dict[str, Varying]]:
    """Return a record's values with one number for each that has a course or a controller, and those.

    Args:
        record: the class of the values.
        tree: the values as they were given, and ``path``, how the graph calls them.
        binder: where problems are noted: a course that can't be read, or a value of one that is not accepted.
        reader: the name of the reader of the values, as ``op rollout``.
        fixed: the numbers that stay the same for the whole run.
        measures: for each number that may be adaptive, the metric that it follows.
    """
    courses: dict[NumberPlace, _Course] = {}
    known = f"of this op {', '.join(measures)} may be" if measures else MEASURED
    for place, classes in _numbers(record, tree):
        item = tree.at(place)
        name = ".".join(place)
        course: _Course | None
        if "adaptive" in item.items:
            remedy = f"as {EXAMPLE}; {known}"
            course = binder.attempt(_adaptive, item, f"{path}.{name}", measures.get(name), remedy)
        elif not item.items.keys().isdisjoint(SHAPES):
            course = binder.attempt(_scheduled, item, f"{path}.{name}", classes, name in fixed)
        else:
            continue
        if course is None:  # it is open, or its problems are noted
            tree = _with_leaf(tree, place, replace(item, value=OPEN))
        else:
            courses[place] = course
            largest = max(course.numbers, key=lambda number: abs(number.value))
            tree = _with_leaf(tree, place, largest)
    binder.problems += _problems_on_the_way(record, tree, courses, path, reader)
    return tree, {".".join(place): course.varying for place, course in courses.items()}


def _numbers(record: type[BaseModel], tree: Tree) -> Iterator[tuple[NumberPlace, set[Any]]]:
    """Yield the place and the classes of each number: an attribute, or a name in one that is a mapping."""
    for name, field in record.model_fields.items():
        item = tree.get(name)
        if not item:
            continue
        classes, value_classes = _number_classes(field.annotation)
        if classes & {int, float}:
            yield (name,), classes
        elif not value_classes or not value_classes <= {int, float}:
            continue
        elif _is_course_of_lists(item):
            yield (name,), set()
        else:
            for key in item.items:
                yield (name, key), value_classes


def _is_course_of_lists(item: Tree) -> bool:
    """Return whether a mapping of numbers is written as if it were one number with a course."""
    shapes = [value for key, value in item.items.items() if key in SHAPES]
    return any(isinstance(shape.value, list) for shape in shapes)


def _with_leaf(tree: Tree, place: NumberPlace, leaf: Tree) -> Tree:
    name, *inner = place
    if inner:
        leaf = _with_leaf(tree.items[name], tuple(inner), leaf)
    return tree.with_item(name, leaf)


def _problems_on_the_way(
    record: type[BaseModel], tree: Tree, courses: Mapping[NumberPlace, _Course], path: str, reader: str
) -> Iterator[Problem]:
    """Yield the problems that a record has where a course begins, ends or steps, and not as ``tree``."""
    changes: dict[NumberPlace, tuple[ValueSchedule, _Course]] = {}
    starts: set[int] = set()
    marks_of_changes: set[Mark] = set()
    for place, course in courses.items():
        if isinstance(course.varying, ValueSchedule):
            changes[place] = course.varying, course
            starts.update(start for start, _ in course.varying.points)
            marks_of_changes.update(number.mark for number in course.numbers)

    if not changes:
        return
    binder = Binder()
    validate(record, tree, path, binder, reader)
    reported = {problem.mark for problem in binder.problems}
    for iteration in sorted(starts):
        changed = tree
        for place, (schedule, course) in changes.items():
            leaf = replace(course.number_at(iteration), value=schedule.at(iteration))
            changed = _with_leaf(changed, place, leaf)
        binder = Binder()
        validate(record, changed, path, binder, reader)
        for problem in binder.problems:
            if problem.mark in reported:
                continue
            reported.add(problem.mark)
            if problem.mark in marks_of_changes:
                yield problem
            else:  # the place of the problem does not show the iteration
                yield replace(problem, law=f"{problem.law} in iteration {iteration}")


def _adaptive(item: Tree, path: str, metric: str | None, remedy: str) -> _Course | None:
    """Return a controller and its first number, or None while one of its numbers is open."""
    controller = read_controller(item, path, metric, remedy)
    if controller is None:
        return None
    return _Course(controller, [item.items["adaptive"]])


def _scheduled(item: Tree, path: str, classes: Collection[Any], is_fixed: bool) -> _Course | None:
    """Return a course and its numbers, or None while one of them is open; ``classes`` are the number's."""
    shape = next(shape for shape in SHAPES if shape in item.items)
    mark = item.key or item.mark
    if not classes:
        law = f"`{path}` has no course: each of the numbers that it names may have one"
        raise fail("course", law, mark, remedy="as {easy: {linear: [1, 0], over: 100}, hard: 1}")
    if is_fixed:
        raise fail("course", f"`{path}` is one number for the whole run", mark)
    if shape != "steps" and float not in classes:
        law = f"`{path}` is a whole number, and changes in steps alone"
        raise fail("course", law, mark, remedy="as {steps: {1: 1024, 200: 2048}}")
    accepted = ("steps",) if shape == "steps" else (shape, "over", "from")
    for name, value in item.items.items():
        if name not in accepted:
            raise _wrong(f"`{path}` changes by `{shape}`, which takes no `{name}`", value.key)
    if any(leaf.value == OPEN for _, leaf in item.walk()):
        return None

    numbers = _steps(item.items[shape], path) if shape == "steps" else _ramp(item, shape, path)
    points = tuple((iteration, number.value) for iteration, number in numbers.items())
    return _Course(ValueSchedule(shape, points), [*numbers.values()])


def _steps(values: Tree, path: str) -> dict[int, Tree]:
    """Return iteration -> the value from there on, ascending."""
    law = f"`{path}` has steps, which are `iteration: value`"
    numbers = {}
    for iteration, number in values.items.items():
        if not iteration.isdecimal() or not number.is_number:
            raise _wrong(law, values.mark)
        numbers[int(iteration)] = number
    if not numbers:
        raise _wrong(law, values.mark)
    if min(numbers) > 1:
        raise _wrong(f"`{path}` has steps, and none of them is for iteration 1", values.mark)
    return dict(sorted(numbers.items()))


def _ramp(item: Tree, shape: str, path: str) -> dict[int, Tree]:
    """Return iteration -> value at both ends of a ramp."""
    values = item.items[shape]
    ends = values.value if isinstance(values.value, list) else []
    if len(ends) != 2 or not all(end.is_number for end in ends):
        raise _wrong(f"`{path}` changes by `{shape}` from one number to another", values.mark)
    over = item.get("over")
    start = item.get("from")
    start_is_count = start is None or start.is_count
    if over is None or not over.is_count or not start_is_count:
        raise _wrong(f"`{path}` changes `over` a number of iterations, 1 or more", (over or item).mark)
    begin = int(start.value) if start else 1
    return {begin: ends[0], begin + int(over.value): ends[1]}


def _wrong(law: str, mark: Mark | None) -> GraphError:
    return fail("course", law, mark, remedy=f"as {EXAMPLE}")


def _number_classes(annotation: Any) -> tuple[set[Any], set[Any]]:
    """Return the classes in an annotation, and those of the values of each ``dict`` in it.

    Of ``Annotated[float, ...] | None`` they are ``float`` and ``NoneType``; lists and literals have none.
    """
    if isinstance(annotation, type):
        return {annotation}, set()
    if get_origin(annotation) in (Literal, list):
        return set(), set()
    if get_origin(annotation) is dict:
        _, value = get_args(annotation)
        return set(), _number_classes(value)[0]
    classes: set[Any] = set()
    value_classes: set[Any] = set()
    for argument in get_args(annotation):
        inner, inner_values = _number_classes(argument)
        classes |= inner
        value_classes |= inner_values
    return classes, value_classes
