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
from rlgraph.ir.plan import ColumnPlan, Plan
from rlgraph.nodes.support.user_call import guarded
from rlgraph.ops import interfaces, registry
from rlgraph.ops.interfaces import Context
from rlgraph.runtime.columns.part import Part, empty, unpack
from rlgraph.runtime.engines.contract import HostedTrainEngine
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
            arguments[port.name] = None if part is None else self._as_op_sees(part, op.engine)
        if columns:
            context.given = {
                name: self._as_op_sees(columns[function.ins[name]], None) for name in function.holds
            }
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
        columns_read = {
            port: self._as_op_sees(columns[function.ins[port]], engine) for port in ports - {*kind.provides}
        }
        return kind(declared.body, hook.attributes, columns_read)

    def _as_op_sees(self, part: Part, engine: str | None) -> Any:
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
        assert model
        assert self.engines
        version = scope.versions[model]
        if handle == "train":
            return self._train_engine(self.engines.train_engine(model, version, context.node), model, context)
        return self.engines.serve_engine(model, version, context.node)

    def _train_engine(
        self, engine: HostedTrainEngine, model: str, context: Context
    ) -> interfaces.TrainEngine:
        """Return a train engine as this op sees it: an update may join another, or be watched for NaN."""
        function, on_nan = self.function, self.plan.schedule.on_nan
        if not registry.load(function.target).declared.updates:
            return JoiningEngine(engine, context.node) if function.joins else engine
        iteration = self.scope.iteration + 1
        rate = self.plan.models[model].rate
        if rate:
            engine.set_rate(rate.at(iteration))
        used: interfaces.TrainEngine = JoiningEngine(engine, context.node) if function.joins else engine
        if function.of or on_nan is None or on_nan == "skip":
            return used
        pool, device = self.at
        name = f"step-{iteration:06d}-{context.node}-{pool}-{device}.jsonl"
        return FiniteEngine(used, context.node, on_nan, self.dumps / name)

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
            law = f"{self._op_name} leaves a state that checkpoints can't hold: {error}"
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
        together(self._op_name, [outs[name] for name in rows], [*rows.values()])
        if counts is not None:
            self._check_counts(counts, len(next(iter(rows.values()))), next(iter(rows)), context)
        return parts

    def _check_counts(self, counts: Part, rows: int, output: str, context: Context) -> None:
        """Check how many rows each has become: together as many as there are, and none more than planned."""
        numbers = counts.near().values
        most = self.plan.domain(self.scope.phase, self.function.outs[output]).most
        if (numbers < 0).any() or numbers.sum() != rows:
            law = f"{self._op_name} returned {rows} rows, and counts that sum to {numbers.sum()}"
            raise ColumnError(f"{law}\n  return as many rows as the counts say, those of a row together")
        if (numbers > most).any():
            row = int(numbers.argmax())
            law = f"{self._op_name} made {numbers[row]} rows of row {context.rows[row]}: {most} are the most"
            remedy = f"set: {{{self.node}.{self.function.roles['most']}: {numbers[row]}}}"
            raise ColumnError(f"{law}\n  {remedy}, or more")

    def _line(self, domain: str) -> list[GraphDomain]:
        return ancestors(self.plan.domains[self.scope.phase], domain)

    @property
    def _op_name(self) -> str:
        return f"`{self.node}` ({self.function.target})"

    def _wanted(self, column: str, columns: Mapping[str, Part], context: Context) -> Wanted:
        """Return what a column has to be, on the rows that this worker read."""
        column_plan = self.plan.columns[self.scope.phase][column]
        rows = self._rows_wanted(column_plan.domain, columns, context)
        numbers = context.rows if rows == len(context.rows) else ()
        return Wanted(
            op=self._op_name,
            column=column,
            plan=column_plan,
            rows=rows,
            lengths=self._lengths_wanted(column_plan, columns),
            finite=self.plan.schedule.on_nan != "skip",
            numbers=numbers,
        )

    def _lengths_wanted(self, column_plan: ColumnPlan, columns: Mapping[str, Part]) -> Any:
        """Return the tokens per row of a column that the op reads along the same tokens; None: any number."""
        if not column_plan.type.axis:
            return None
        plans = self.plan.columns[self.scope.phase]
        op = registry.load(self.function.target)
        ports = [port for port in op.inputs if port.type.axis == column_plan.type.axis]
        aligned_columns = {self.function.ins.get(port.name) for port in ports}
        for name, part in columns.items():
            if name in aligned_columns and plans[name].domain == column_plan.domain:
                return part.lengths
        return None

    def _rows_wanted(self, domain: str, columns: Mapping[str, Part], context: Context) -> int | None:
        """Return how many rows of a domain the op has to write; None: any number."""
        plans = self.plan.columns[self.scope.phase]
        rows_by_domain = {plans[name].domain: len(part) for name, part in columns.items()}
        if domain in rows_by_domain:
            return rows_by_domain[domain]
        written = self.plan.domains[self.scope.phase][domain]
        if written.parent in rows_by_domain:
            rows_read = len(context.rows) if context.whole is None else len(context.whole)
            return None if written.most else written.times * rows_read
        for read_domain, rows in rows_by_domain.items():
            line = self._line(read_domain)
            if domain in [ancestor.name for ancestor in line]:
                domains_below = takewhile(lambda ancestor: ancestor.name != domain, line)
                return rows // prod(below.times for below in domains_below)
        if self.scope.asks is None:
            return None
        # the rounds of a region are numbered by what they ask of their source
        return self.scope.asks * registry.load(self.function.target).declared.of_each


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
    kept_rows = np.flatnonzero(outputs[0].near().values) if filters else None
    return {
        "lengths": ragged.lengths,
        "kept": kept_rows,
        "counts": None if counts is None else counts.near().values,
    }
