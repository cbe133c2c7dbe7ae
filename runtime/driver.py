"""The driver walks the plan: it holds references to columns, never their rows.

A step starts as soon as it is submitted and its inputs are there; Ray follows the references. The driver
waits only where a layout depends on what came out: how many rows, how many tokens each.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlgraph.errors import RlgraphError, RunError
from rlgraph.plan import Plan, Step
from rlgraph.runtime import layout as layouts
from rlgraph.runtime.cluster import Cluster
from rlgraph.runtime.layout import Layout
from rlgraph.runtime.worker import Report, Scope
from rlgraph.text import plan_text, sentence

Watch = Callable[[Step], None]


@dataclass
class State:
    """What a run remembers from one iteration to the next, beside weights and optimizers."""

    iteration: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)  # rows that each data source has given


@dataclass(frozen=True)
class Ran:
    """A step that ran: when it started and ended on each device, in seconds since the epoch."""

    step: Step
    reports: Mapping[int, Report]  # by device


class StepError(RunError):
    """A step failed; the message shows the plan with a mark on it."""


class Walk:
    """One pass through the steps of a phase."""

    def __init__(self, plan: Plan, cluster: Cluster, state: State, phase: str, watch: Watch) -> None:
        self.plan, self.cluster, self.state, self.phase, self.watch = plan, cluster, state, phase, watch
        self.columns = plan.columns[phase]
        self.refs: dict[str, list[Any]] = {}  # column -> a reference for each device
        self.layouts: dict[tuple[str, str], Layout] = {}  # (domain, layout) -> rows of each device
        self.rows: dict[str, int] = {}  # domain -> how many rows
        self.makers: dict[str, Step] = {}  # domain -> the step that made it
        self.origins: dict[str, Any] = {}  # filtered domain -> the parent's row of each of its rows
        self.pending: dict[Any, tuple[Step, int]] = {}  # reference of a report -> its step and device
        self.reports: dict[int, dict[int, Report]] = {}  # step -> device -> report
        self.kept: dict[str, list[Any]] = {}  # columns that outlive their last reader

    def run(self, steps: Sequence[Step], keep: Callable[[str], bool]) -> list[Ran]:
        """Carry out the steps; columns for which ``keep`` is true stay in ``kept`` after they are freed.

        Raises:
            StepError: a step failed, or took longer than ``schedule.timeout``.
        """
        for step in steps:
            self._submit(step)
            self.kept.update({column: self.refs[column] for column in step.writes if keep(column)})
            for column in step.frees:
                del self.refs[column]
        self._await({step.id for step in steps})
        return [Ran(step, self.reports[step.id]) for step in steps]

    def _submit(self, step: Step) -> None:
        if step.kind == "sync":
            ((model, version),) = self._versions(step).items()
            self._call(step, "sync", lambda device: (model, version))
        elif step.kind == "repeat":
            self._repeat(step)
        elif step.kind == "select":
            self._select(step)
        elif step.kind == "repartition":
            self._repartition(step)
        else:
            self._run(step)

    def _run(self, step: Step) -> None:
        domain = self.columns[step.reads[0]].domain if step.reads else ""
        rows = self._layout(domain, step.layout) if domain else None
        total = self.rows.get(domain, 0)
        position, versions = self.state.positions.get(step.node, 0), self._versions(step)

        def arguments(device: int) -> tuple[Any, ...]:
            held = () if rows is None else rows[device]
            scope = Scope(self.phase, self.state.iteration, held, total, position, versions)
            return (step.node, scope, *(self.refs[column][device] for column in step.reads))

        self._call(step, "run", arguments)
        if step.writes and (made := self.columns[step.writes[0]].domain) != domain:
            self._made(step, made, domain)
        if step.filters:
            self._filtered(step, domain)

    def _versions(self, step: Step) -> dict[str, int]:
        """The versions that a step reads: the plan counts from those on entry to the iteration."""
        ahead = {model: int(version.partition("+")[2] or 0) for model, version in step.models.items()}
        return {model: self.state.versions.get(model, 0) + more for model, more in ahead.items()}

    def _call(self, step: Step, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
        for column in step.writes:
            self.refs[column] = [None] * self.cluster.size
        for device in step.devices:
            made = self.cluster.call(device, method, *arguments(device), returns=1 + len(step.writes))
            self.pending[made[0]] = (step, device)
            for column, part in zip(step.writes, made[1:], strict=True):
                self.refs[column][device] = part

    def _made(self, step: Step, domain: str, parent: str) -> None:
        """Note the rows of a domain that a step has made."""
        self.makers[domain] = step
        if parent:
            times = self.columns[step.writes[0]].times
            self.rows[domain] = self.rows[parent] * times
            shares = layouts.children(self._layout(parent, step.layout), times)
        else:
            self.rows[domain] = len(self._report(step, 0).lengths)
            shares = layouts.one(self.rows[domain], self.cluster.size)
        self.layouts[domain, step.layout] = shares

    def _filtered(self, step: Step, parent: str) -> None:
        """Note the rows that a filter kept, numbered anew in their old order."""
        held = self._layout(parent, step.layout)
        stayed = [held[device][self._report(step, device).kept] for device in step.devices]
        domain = f"{parent}/{step.node}"
        self.makers[domain] = step
        self.origins[domain] = np.sort(np.concatenate(stayed))
        self.rows[domain] = len(self.origins[domain])

    def _select(self, step: Step) -> None:
        (column,), (copy,) = step.reads, step.writes
        filtered = self.makers[self.columns[copy].domain]
        self._call(
            step, "select", lambda device: (self._report(filtered, device).kept, self.refs[column][device])
        )

    def _repeat(self, step: Step) -> None:
        (column,), (copy,) = step.reads, step.writes
        times = self.columns[copy].times
        self._call(step, "repeat", lambda device: (times, self.refs[column][device]))

    def _repartition(self, step: Step) -> None:
        """Every device gathers its rows of the new layout from the parts that hold them."""
        domain = self.columns[step.reads[0]].domain
        target = self._layout(domain, step.layout)
        origin = {}
        for column in step.reads:
            held = self._layout(domain, self.columns[column].layout)
            origin[column] = held, *layouts.where(held, self.rows[domain])

        def arguments(device: int) -> tuple[Any, ...]:
            picks, counts, parts = [], [], []
            for column, (held, owner, place) in origin.items():
                wanted = target[device]
                sources = sorted(set(owner[wanted].tolist())) or [0]
                start = np.cumsum([0] + [len(held[source]) for source in sources])
                shift = np.zeros(len(held), np.int64)
                shift[sources] = start[:-1]
                picks.append(shift[owner[wanted]] + place[wanted])
                counts.append(len(sources))
                parts += [self.refs[column][source] for source in sources]
            return (picks, counts, *parts)

        self._call(step, "repartition", arguments)

    def _layout(self, domain: str, name: str) -> Layout:
        """Rows of each device; a balanced layout waits for the lengths of the rows."""
        if (domain, name) not in self.layouts:
            self.layouts[domain, name] = self._new_layout(domain, name)
        return self.layouts[domain, name]

    def _new_layout(self, domain: str, name: str) -> Layout:
        devices, rows = self.cluster.size, self.rows[domain]
        kind, _, minibatches = name.partition("/")
        if kind == "balanced":
            return layouts.balanced(self._lengths(domain), devices, int(minibatches))
        if kind == "one":
            return layouts.one(rows, devices)
        of = next(column for column in self.columns.values() if column.domain == domain)
        if domain in self.origins and of.parent:
            return layouts.some(self._layout(of.parent, name), self.origins[domain])
        return (
            layouts.children(self._layout(of.parent, name), of.times)
            if of.parent
            else layouts.even(rows, devices)
        )

    def _lengths(self, domain: str) -> Any:
        """int64 ``[rows]``: tokens of each row, as the step that made the domain reported."""
        step = self.makers[domain]
        if domain in self.origins:
            parent = self.columns[step.reads[0]].domain
            return self._lengths(parent)[self.origins[domain]]
        lengths = np.zeros(self.rows[domain], np.int64)
        for device in step.devices:
            lengths[self.layouts[domain, step.layout][device]] = self._report(step, device).lengths
        return lengths

    def _report(self, step: Step, device: int) -> Report:
        if device not in self.reports.get(step.id, {}):
            self._await({step.id})
        return self.reports[step.id][device]

    def _await(self, steps: set[int]) -> None:
        """Collect reports until all of these steps have theirs. Whatever fails first, anywhere, is raised."""
        last = time.monotonic()
        while waiting := {step.id: step for step, _ in self.pending.values() if step.id in steps}:
            first = waiting[min(waiting)]
            self.watch(first)
            ready, _ = self.cluster.wait([*self.pending], timeout=1.0)
            for reference in ready:
                self._collect(reference)
            now = time.monotonic()
            last = now if ready else last
            if now - last > self.plan.schedule["timeout"]:
                raise self._failed(first, f"nothing came for {now - last:.0f} s (schedule.timeout)")

    def _collect(self, reference: Any) -> None:
        step, device = self.pending.pop(reference)
        try:
            (report,) = self.cluster.get([reference])
        except Exception as error:
            raise self._failed(step, _reason(error), device) from error
        self.reports.setdefault(step.id, {})[device] = report

    def _failed(self, step: Step, reason: str, device: int | None = None) -> StepError:
        where = "" if device is None else f" on {step.pool}[{device}]"
        place = f"iteration {self.state.iteration + 1}" if self.phase == "train" else "the evaluation"
        marked = plan_text(self.plan, failed=(step.phase, step.id))
        return StepError(f"{marked}\nstep {step.id} of {place} failed{where}: {sentence(step)}\n  {reason}")


def _reason(error: Exception) -> str:
    """What went wrong: a user's mistake in its own words, anything else with its traceback."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RlgraphError):
        return str(cause)
    if type(error).__module__.startswith("ray.") and not hasattr(error, "cause"):
        return f"its worker is gone: {str(error).strip()}\n  the run directory's logs/ has its last lines"
    return (
        "".join(traceback.format_exception(error)).strip()
        if not hasattr(error, "cause")
        else str(error).strip()
    )
