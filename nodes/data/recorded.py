"""A data source of the rows that a run recorded (``schedule.record_every``), in place of a rollout.

replace: {rollout: {op: data.recorded, model: policy, run: runs/grpo, columns: {rewards: float32}}}
"""

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from rlgraph.nodes.rollout.rollout import Rollout
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.record_file import Recorded, RecordError, RecordMetadata, about, read, steps_of
from rlgraph.ops import Context, op
from rlgraph.ops.column_types import ColumnType, File, strip_none
from rlgraph.ops.output_record import with_columns

BASE = "tokens"  # the column whose rows are those of a recorded iteration


def check_run(*, run: str, columns: Mapping[str, str] | None, temperature: float) -> None:
    """Check that every recorded iteration of a run has a rollout's columns and these, of their types.

    Raises:
        RecordError: one has not, or the run's plan says that its rows were sampled at another temperature.
    """
    folder = Path(run)
    for iteration in recorded_steps(folder).values():
        _places(iteration, wanted_types(columns or {}))
    sampled_at = _sampled_at(folder)
    if sampled_at and sampled_at != temperature:
        raise RecordError(f"{run} sampled at temperature {sampled_at:g}; the graph says {temperature:g}")


@op(
    makes="samples",
    rows="all",
    recorded=True,
    columns="columns",
    load=check_run,
    roles={"temperature": "temperature"},
)
def recorded(
    ctx: Context,
    *,
    run: File,
    columns: dict[str, str] | None = None,
    temperature: PositiveFloat = 1.0,
) -> Rollout:
    """The samples of an iteration that a run recorded, in their original order: a rollout without an engine.

    Iteration t takes the samples of the t-th recorded iteration, and starts again from the first after the
    last. ``model`` is the model that sampled them; updates that train on them correct for its older weights.
    Writes the columns of a rollout, and ``columns``; values that the run recorded per prompt are repeated for
    the prompt's samples. Records ``NODE/iteration``, the iteration in which the rows were recorded.

    Attributes:
        run: the directory of the run, which must have had schedule.record_every.
        columns: more recorded columns to read, each with its type, as in {rewards: float32}; null: none.
        temperature: the number by which the logits were divided when the rows were sampled, above 0.

    Example:
        rollout: {op: data.recorded, model: policy, run: runs/grpo, columns: {rewards: float32}}
    """
    steps = [*recorded_steps(Path(run)).items()]
    iteration, folder = steps[ctx.iteration % len(steps)]
    ctx.record("iteration", iteration, over="iterations")
    loaded = load(folder, wanted_types(columns or {}))
    rollout_columns = {name: loaded.pop(name) for name in Rollout._fields if name in loaded}
    return with_columns(Rollout(**rollout_columns), loaded)


def recorded_steps(run: Path) -> dict[int, Path]:
    """Return iteration -> the folder of its columns.

    Raises:
        RecordError: the run recorded none.
    """
    steps = steps_of(run)
    if not steps:
        law = f"{run} has recorded no columns" if run.is_dir() else f"there is no run {run}"
        raise RecordError(f"{law}; one with schedule.record_every does")
    return steps


def wanted_types(columns: Mapping[str, str]) -> dict[str, ColumnType]:
    """Return the columns that must be there, with their types: a rollout's and more."""
    types = {}
    for name, hint in typing.get_type_hints(Rollout, include_extras=True).items():
        is_optional = hint is not strip_none(hint)
        if not is_optional:
            types[name] = ColumnType.of(hint)
    for name, text in columns.items():
        types[name] = ColumnType.parse(text, "samples")
    return types


def _sampled_at(run: Path) -> float | None:
    """Return the temperature of a run's rollout, if its plan is there and has one for the whole run."""
    plan_file = run / "plan.json"
    if not plan_file.is_file():
        return None
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    for name, column in plan["columns"]["train"].items():
        if _label(name) != BASE:
            continue
        function = plan["functions"]["train"].get(column["writer"])
        if function and "temperature" not in function["courses"]:
            temperature: float | None = function["attributes"].get("temperature")
            return temperature
    return None


def load(folder: Path, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Load columns of a recorded iteration as an op returns them, each with one row per sample.

    Raises:
        RecordError: one is not there, or of another type.
    """
    places = _places(folder, types)
    columns_of: dict[Path, list[str]] = {}
    for place in places.values():
        columns_of.setdefault(place.path, []).append(place.column)
    tables = {path: read(path, columns) for path, columns in columns_of.items()}
    loaded = {}
    for name, place in places.items():
        loaded[name] = _value(tables[place.path][place.column], place.times, types[name])
    return loaded


@dataclass(frozen=True)
class RecordedPlace:
    """The file and the name of a column, and how many samples each of its rows is for."""

    path: Path
    column: str
    times: int


def _places(folder: Path, types: Mapping[str, ColumnType]) -> dict[str, RecordedPlace]:
    """Find columns in the files of an iteration: in that of its samples, or in that of their prompts.

    Raises:
        RecordError: one is not there, or of another type; or there are no samples.
    """
    files = {path: about(path) for path in sorted(folder.glob("*.parquet"))}
    samples_file = None
    for path, metadata in files.items():
        if BASE in map(_label, metadata.types):
            samples_file = path
            break
    if samples_file is None:
        raise RecordError(f"{folder} has no column `{BASE}`: its run had no rollout")
    searched = [samples_file]
    for path, metadata in files.items():
        if metadata.domain == files[samples_file].parent:
            searched.append(path)
    places = {}
    for name, kind in types.items():
        places[name] = _place(files, searched, folder, name, kind)
    return places


def _place(
    files: Mapping[Path, RecordMetadata], paths: list[Path], folder: Path, name: str, kind: ColumnType
) -> RecordedPlace:
    """Find a column by its name, first among those per sample, then among those per prompt."""
    known: set[str] = set()
    for path in paths:
        column_of_label = {_label(column): column for column in files[path].types}
        known |= column_of_label.keys()
        if name not in column_of_label:
            continue
        column = column_of_label[name]
        stored = ColumnType.parse(files[path].types[column])
        if (stored.dtype, stored.axis, len(stored.fixed)) != (kind.dtype, kind.axis, len(kind.fixed)):
            raise RecordError(f"{folder} has `{name}` as {stored}; the graph says {kind}")
        samples_per_row = 1 if path == paths[0] else files[paths[0]].times
        return RecordedPlace(path, column, samples_per_row)
    raise RecordError(f"{folder} has no column `{name}` for its samples; it has {', '.join(sorted(known))}")


def _label(column: str) -> str:
    """Return a column's name without its filter: ``tokens`` of ``tokens/informative``."""
    return re.split(r"[*/@]", column)[0]


def _value(column: Recorded, times: int, kind: ColumnType) -> Any:
    """Return a recorded column as an op returns it, each row repeated: a tensor, a ``Ragged``, or text.

    Integers that were stored narrower are int64.
    """
    if isinstance(column.values, list):  # text, or values of JSON
        repeated: list[Any] = []
        for value in column.values:
            repeated += [value] * times
        return repeated
    values = torch.tensor(column.values)
    if kind.dtype == "int64":
        values = values.long()
    if column.offsets is None:
        return values.repeat_interleave(times, dim=0)
    rows = Ragged(values, torch.tensor(column.offsets))
    return rows.take(torch.arange(len(rows)).repeat_interleave(times))
