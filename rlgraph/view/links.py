"""What goes from step to step: columns, and versions of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlgraph.plan import ColumnPlan, Plan, Step

VERBS = {"repartition": "move"}  # kind -> its word, where that is another


@dataclass(frozen=True)
class Link:
    """The columns that one step reads of another, by their numbers; none where it only has to come first."""

    source: int
    target: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Weights:
    """A version of a model: the step that makes it, if one of this iteration does, and those that read it."""

    model: str
    version: str  # v, v+1, v-1
    writer: int | None
    readers: tuple[int, ...]

    @property
    def name(self) -> str:
        """As ``policy@v+1``."""
        return f"{self.model}@{self.version}"


def phases(plan: Plan) -> dict[str, tuple[Step, ...]]:
    """The steps of training, and of evaluation where there is one."""
    return {"train": plan.steps} | ({"eval": plan.eval_steps} if plan.eval_steps else {})


def links(steps: Sequence[Step]) -> list[Link]:
    """Between the steps of a phase, in their order; an order that follows from other links is left out."""
    writer = {column: step.id for step in steps for column in step.writes}
    before: dict[int, int] = {}  # step -> all that comes before it, a bit each
    found = []
    for step in steps:
        columns: dict[int, list[str]] = {}
        for column in step.reads:
            columns.setdefault(writer[column], []).append(column)
        reached = _with(columns, before)
        for number in sorted(step.after, reverse=True):
            if not reached >> number & 1:
                columns[number] = []
                reached |= _with([number], before)
        before[step.id] = reached
        found += [Link(source, step.id, tuple(names)) for source, names in sorted(columns.items())]
    return found


def _with(numbers: Iterable[int], before: Mapping[int, int]) -> int:
    """Some steps and all that come before them, a bit each."""
    reached = 0
    for number in numbers:
        reached |= before[number] | 1 << number
    return reached


def weights(steps: Sequence[Step]) -> list[Weights]:
    """The versions of models that the steps of a phase read and write, model by model, oldest first.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [found.name for found in weights(compile_graph("grpo", devices=1).steps)]
        ['policy@v', 'policy@v+1', 'ref@v']
    """
    readers: dict[tuple[str, int], list[int]] = {}
    writers: dict[tuple[str, int], int] = {}
    for step in steps:
        for model, label in step.models.items():
            if not label:  # a move of an engine, whatever it holds
                continue
            version = int(label[1:] or 0)
            readers.setdefault((model, version), []).append(step.id)
            if step.updated == model:
                writers[model, version + 1] = step.id
    order = list(dict.fromkeys(model for model, _ in (*readers, *writers)))
    keys = sorted({*readers, *writers}, key=lambda key: (order.index(key[0]), key[1]))
    return [
        Weights(model, f"v{version:+d}" if version else "v", writers.get(key), tuple(readers.get(key, ())))
        for key in keys
        for model, version in [key]
    ]


def title(step: Step) -> str:
    """A step in a few words: the user's name of it, or what was inserted."""
    if not step.inserted:
        return step.node
    what = " and ".join(step.parts) + " of " if step.parts else ""
    about = ", ".join(step.reads) or ", ".join(step.models)
    return f"{VERBS.get(step.kind, step.kind)} {what}{about}"


def typed(names: Sequence[str], columns: Mapping[str, ColumnPlan]) -> list[str]:
    """Columns with their types, as ``rewards: float32[samples]``."""
    return [f"{name}: {columns[name].type}" for name in names]


def pool_title(plan: Plan, pool: str) -> str:
    """As ``pool gen: 4 devices``."""
    count = plan.pools[pool]
    return f"pool {pool}: {count} device{'s' * (count != 1)}"


def region_title(region: str) -> str:
    """Of the steps that are repeated until a filter has let enough rows through."""
    return f"repeated until {region} has let enough rows through"
