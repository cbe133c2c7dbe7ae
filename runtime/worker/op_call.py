"""One op on the rows of one worker: its arguments from columns, hooks and engines, and its columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.ir.domains import GraphDomain, ancestors
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.user_call import guarded
from rlgraph.ops import registry
from rlgraph.ops.interfaces import Context
from rlgraph.runtime.columns.part import Part, empty, unpack
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.messages.tasks import Place
from rlgraph.runtime.worker.engine_host import EngineHost
from rlgraph.runtime.worker.joining import JoiningEngine
from rlgraph.runtime.worker.nan_guard import FiniteEngine
from rlgraph.runtime.worker.outputs import ColumnError, Wanted, together


@dataclass(frozen=True)
class OpCall:
    """An op, and what a worker has for it.

    Attributes:
        function: with the attributes that it has in this iteration.
        tokenizer: gives that of a model.
        dumps: the folder for what is not finite.
    """

    plan: Plan
    node: str
    function: Function
    scope: Scope
    at: Place
    engines: EngineHost | None
    tokenizer: Callable[[str], Any]
    dumps: Path

    def __call__(self, columns: Mapping[str, Part], context: Context) -> Any:
        """Return what the op returns for columns by their names; None where there are no rows."""
        function = self.function
        op = registry.load(function.target)
        if columns and op.engine is None and not op.declared.holds and not any(map(len, columns.values())):
            return None  # no rows, nothing to compute
        attributes: dict[str, Any] = dict(function.attributes)
        if self.scope.asks is not None:
            attributes[function.roles["rows"]] = self.scope.asks
        for path, hook in function.hooks.items():
            name, _, key = path.partition(".")
            bound = self._hook(op.hooks[name], hook, columns, op.engine)
            attributes[name] = {**attributes.get(name, {}), key: bound} if key else bound
        arguments = op.arguments(attributes)
        for parameter, handle in function.handles.items():
            model = function.of if parameter == "of" else function.model
            arguments[parameter] = self._handle(handle, model, context)
        for port in (*op.inputs, *op.further(function.attributes)):
            part = columns.get(function.ins.get(port.name, ""))
            arguments[port.name] = None if part is None else self._read(part, op.engine)
        if columns:
            context.given = {name: self._read(columns[function.ins[name]], None) for name in function.holds}
        body = partial(guarded, op.body)  # a user's op may exit: the worker, or this very run, would end
        result = self._round(body, arguments, context) if self.scope.yields else body(**arguments)
        if op.declared.updates and function.model and not function.joins:
            assert self.engines
            self.engines.versions[function.model] += 1
        return result

    def _round(self, body: Callable[..., Any], arguments: Mapping[str, Any], context: Context) -> Any:
        """Return what an op returns that may leave samples unfinished, and does so where others wait."""
        assert self.engines
        context.is_due, context.yields = self.engines.round_end.begin(self.node), True
        result = body(**arguments)
        if context.whole is not None and len(context.whole) < len(context.rows):
            self.engines.round_end.end(self.node)
        return result

    def _hook(self, kind: Any, hook: Function, columns: Mapping[str, Part], engine: str | None) -> Any:
        function = self.function
        declared = registry.load(hook.target, kind=kind)
        ports = {port.name for port in declared.inputs if kind.reads} & function.ins.keys()
        read = {port: self._read(columns[function.ins[port]], engine) for port in ports - {*kind.provides}}
        return kind(declared.body, hook.attributes, read)

    def _read(self, part: Part, engine: str | None) -> Any:
        """Return a column as the body sees it: on the device, if it lies there, for a train engine alone."""
        return unpack(part if engine == "train" else part.near())

    def _handle(self, handle: str, model: str | None, context: Context) -> Any:
        function, scope = self.function, self.scope
        if handle == "context":
            if self.engines:
                context.session = self.engines.sessions.setdefault((scope.phase, self.node), {})
            return context
        if handle == "tokenizer":
            assert function.tokenizer
            return self.tokenizer(function.tokenizer)
        assert model and self.engines
        engine = self.engines.at(model, handle, scope.versions[model], context.node)
        updates = registry.load(function.target).declared.updates
        if updates and (rate := self.plan.models[model].rate):
            engine.set_rate(rate.at(scope.iteration + 1))
        if function.joins:
            engine = JoiningEngine(engine, context.node)
        on_nan = self.plan.schedule.on_nan
        if on_nan not in ("stop", "dump") or function.of or not updates:
            return engine
        pool, device = self.at
        name = f"step-{scope.iteration + 1:06d}-{context.node}-{pool}-{device}.jsonl"
        return FiniteEngine(engine, context.node, on_nan, self.dumps / name)

    def state(self, context: Context) -> str:
        """Return what an op that keeps a state has left of it, as JSON.

        Raises:
            ColumnError: it is none.
        """
        if self.function.state != self.node:
            return ""
        try:
            return json.dumps(context.state, allow_nan=False)
        except (TypeError, ValueError) as error:
            law = f"{self._named} leaves a state that checkpoints can't hold: {error}"
            raise ColumnError(
                f"{law}\n  a state is JSON: finite numbers, texts, lists, and dicts by text"
            ) from None

    def outputs(self, result: Any, columns: Mapping[str, Part], context: Context) -> list[Part]:
        """Return a part for each column that the op writes, from what it returned for columns and rows.

        Raises:
            ColumnError: one is not of its type, has other rows or tokens, or holds what is not finite.
        """
        outs, kinds = self.function.outs, self.plan.columns[self.scope.phase]
        values = [result] if [*outs] == [""] else [getattr(result, name, None) for name in outs]
        none = (columns or self.function.holds) and not any(map(len, columns.values()))
        parts = [
            empty(kinds[column])
            if value is None and none
            else self._wanted(column, columns, context).packed(value)
            for column, value in zip(outs.values(), values, strict=True)
        ]
        rows, counts = made(self.function, parts)
        together(self._named, [outs[name] for name in rows], [*rows.values()])
        if counts is not None:
            self._check_counts(counts, len(next(iter(rows.values()))), next(iter(rows)), context)
        return parts

    def _check_counts(self, counts: Part, rows: int, output: str, context: Context) -> None:
        """Check how many rows each has become: together as many as there are, and none more than planned."""
        numbers = counts.near().values
        most = self.plan.domain(self.scope.phase, self.function.outs[output]).most
        if (numbers < 0).any() or numbers.sum() != rows:
            law = f"{self._named} returned {rows} rows, and counts that sum to {numbers.sum()}"
            raise ColumnError(f"{law}\n  return as many rows as the counts say, those of a row together")
        if (numbers > most).any():
            row = int(numbers.argmax())
            law = f"{self._named} made {numbers[row]} rows of row {context.rows[row]}: {most} are the most"
            remedy = f"set: {{{self.node}.{self.function.roles['most']}: {numbers[row]}}}"
            raise ColumnError(f"{law}\n  {remedy}, or more")

    def _line(self, domain: str) -> list[GraphDomain]:
        return ancestors(self.plan.domains[self.scope.phase], domain)

    @property
    def _named(self) -> str:
        return f"`{self.node}` ({self.function.target})"

    def _wanted(self, column: str, columns: Mapping[str, Part], context: Context) -> Wanted:
        """Return what a column has to be, on the rows that this worker read."""
        plan = self.plan.columns[self.scope.phase]
        own, read = plan[column], {plan[name].domain: part for name, part in columns.items()}
        op = registry.load(self.function.target)
        along = {self.function.ins.get(port.name) for port in op.inputs if port.type.axis == own.type.axis}
        alike = [
            part.lengths
            for name, part in columns.items()
            if own.type.axis and name in along and plan[name].domain == own.domain
        ]
        domain = self.plan.domains[self.scope.phase][own.domain]
        # the rounds of a region are numbered by what they ask of their source
        rows = None if self.scope.asks is None else self.scope.asks * op.declared.of_each
        if own.domain in read:
            rows = len(read[own.domain])
        elif domain.parent in read:
            whole = len(context.rows) if context.whole is None else len(context.whole)
            rows = None if domain.most else domain.times * whole
        elif above := [name for name in read if own.domain in {d.name for d in self._line(name)}]:
            below = takewhile(lambda d: d.name != own.domain, self._line(above[0]))
            rows = len(read[above[0]]) // prod(made.times for made in below)
        finite = self.plan.schedule.on_nan != "skip"
        numbers = context.rows if rows == len(context.rows) else ()
        return Wanted(self._named, column, own, rows, alike[0] if alike else None, finite, numbers)


def made(function: Function, outputs: Sequence[Part]) -> tuple[dict[str, Part], Part | None]:
    """Return what an op wrote by the op's names; beside it the counts of an op that says such."""
    rows = dict(zip(function.outs, outputs, strict=True))
    return rows, rows.pop(registry.load(function.target).declared.counts or "counts of none", None)


def rows_made(function: Function, outputs: Sequence[Part]) -> dict[str, Any]:
    """Return what a report says of the rows that an op wrote: lengths, counts, which a filter keeps."""
    if not outputs:
        return {}
    rows, counts = made(function, outputs)
    ragged = next((part for part in rows.values() if part.offsets is not None), next(iter(rows.values())))
    filters = registry.load(function.target).declared.filters
    kept = np.flatnonzero(outputs[0].near().values) if filters else None
    return {
        "lengths": ragged.lengths,
        "kept": kept,
        "counts": None if counts is None else counts.near().values,
    }
