"""One op on the rows of one worker: its arguments from columns, hooks and engines, and its columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.ir.domains import ancestors
from rlgraph.ir.function import Function
from rlgraph.ir.plan import ColumnPlan, Plan
from rlgraph.nodes.support.user_call import guarded
from rlgraph.ops import interfaces, registry
from rlgraph.ops.interfaces import Context
from rlgraph.runtime.columns.chunk import Chunk, empty, row_lengths, unpack
from rlgraph.runtime.engines.contract import HostedTrainEngine
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.messages.tasks import Place
from rlgraph.runtime.worker.engine_host import EngineHost
from rlgraph.runtime.worker.joining import JoiningEngine
from rlgraph.runtime.worker.nan_guard import FiniteEngine
from rlgraph.runtime.worker.outputs import ColumnError, Wanted, together
from rlgraph.runtime.worker.unchanged_inputs import UnchangedInputs


@dataclass(frozen=True)
class OpCall:
    """An op, and what a worker has for it.

    Attributes:
        plan: of the run.
        node: the name of the op's node.
        function: the node, with the attributes that it has in this iteration.
        scope: the worker's share of the step.
        place: the worker's pool and device.
        engines: of the worker; None of one that has no device.
        tokenizer: returns the tokenizer of a model.
        dumps: the folder for rows of updates that are not finite.
    """

    plan: Plan
    node: str
    function: Function
    scope: Scope
    place: Place
    engines: EngineHost | None
    tokenizer: Callable[[str], Any]
    dumps: Path

    def __call__(self, columns: Mapping[str, Chunk], context: Context) -> Any:
        """Return what the op returns for columns by their names; None where there are no rows."""
        function = self.function
        op = registry.load(function.target)
        # an engine's ranks work together, and a node that holds rows may return some of these
        runs_without_rows = op.engine is not None or op.declared.holds
        is_empty = bool(columns) and not _has_rows(columns)
        if is_empty and not runs_without_rows:
            return None

        # 1. Attributes: the rows asked of a source, and hooks bound to the columns that they read.
        attributes: dict[str, Any] = dict(function.attributes)
        if self.scope.requested_rows is not None:
            attributes[function.roles["rows"]] = self.scope.requested_rows
        inputs = UnchangedInputs()
        for path, hook in function.hooks.items():
            name, _, key = path.partition(".")
            bound = self._hook(op.hooks[name], hook, columns, op.engine)
            for parameter, value in bound.columns.items():
                inputs.add(parameter, function.ins[parameter], value)
            if key:
                attributes[name] = {**attributes.get(name, {}), key: bound}
            else:
                attributes[name] = bound

        # 2. Arguments: attributes, handles and columns.
        arguments = op.arguments(attributes)
        for parameter, handle in function.handles.items():
            model = function.of if parameter == "of" else function.model
            arguments[parameter] = self._handle(handle, model, context)
        for port in (*op.inputs, *op.further(function.attributes)):
            name = function.ins.get(port.name, "")
            column = columns.get(name)
            value = None if column is None else self._unpacked(column, op.engine)
            arguments[port.name] = value
            inputs.add(port.name, name, value)
        if columns:
            context.given = {
                name: self._unpacked(columns[function.ins[name]], None) for name in function.holds
            }

        # 3. Call it. A user's op may exit: the worker, or this very run, would end.
        body = partial(guarded, op.body)
        ends_early = self.scope.may_end_early
        result = self._round(body, arguments, context) if ends_early else body(**arguments)
        inputs.check(self._op_name)
        if op.declared.updates and function.model and not function.joins:
            assert self.engines
            self.engines.versions[function.model] += 1
        return result

    def _round(self, body: Callable[..., Any], arguments: Mapping[str, Any], context: Context) -> Any:
        """Return what an op returns that may leave samples unfinished, and does so where others wait."""
        assert self.engines
        context.is_due = self.engines.round_end.begin(self.node)
        context.yields = True
        result = body(**arguments)
        if context.whole is not None and len(context.whole) < len(context.rows):
            self.engines.round_end.end(self.node)
        return result

    def _hook(self, kind: Any, hook: Function, columns: Mapping[str, Chunk], engine: str | None) -> Any:
        """Return a hook with its attributes, and the columns of this worker that it reads."""
        ins = self.function.ins
        declared = registry.load(hook.target, kind=kind)
        columns_read = {}
        if kind.reads:
            for port in declared.inputs:
                is_column = port.name in ins and port.name not in kind.provides
                if is_column:
                    columns_read[port.name] = self._unpacked(columns[ins[port.name]], engine)
        return kind(declared.body, hook.attributes, columns_read)

    def _unpacked(self, column: Chunk, engine: str | None) -> Any:
        """Return a column as the body sees it: on the device, if it lies there, for a train engine alone."""
        return unpack(column if engine == "train" else column.near())

    def _handle(self, handle: str, model: str | None, context: Context) -> Any:
        """Return the argument of a handle: the context, a tokenizer, or an engine of a model."""
        function = self.function
        if handle == "context":
            if self.engines:
                context.session = self.engines.sessions.setdefault((self.scope.phase, self.node), {})
            return context
        if handle == "tokenizer":
            assert function.tokenizer
            return self.tokenizer(function.tokenizer)
        assert model
        assert self.engines
        version = self.scope.versions[model]
        if handle == "train":
            return self._train_engine(self.engines.train_engine(model, version, context.node), model, context)
        return self.engines.serve_engine(model, version, context.node)

    def _train_engine(
        self, engine: HostedTrainEngine, model: str, context: Context
    ) -> interfaces.TrainEngine:
        """Return a train engine as this op sees it: an update may join another, or be watched for NaN."""
        function = self.function
        on_nan = self.plan.schedule.on_nan
        used: interfaces.TrainEngine = engine
        if function.joins:
            used = JoiningEngine(engine, context.node)
        if not registry.load(function.target).declared.updates:
            return used
        iteration = self.scope.iteration + 1
        rate = self.plan.models[model].rate
        if rate:
            engine.set_rate(rate.at(iteration))
        copies_weights = bool(function.of)
        if copies_weights:
            return used
        if on_nan is None or on_nan == "skip":
            return used
        pool, device = self.place
        name = f"step-{iteration:06d}-{context.node}-{pool}-{device}.jsonl"
        return FiniteEngine(used, context.node, on_nan, self.dumps / name)

    def state(self, context: Context) -> str:
        """Return the state of an op that keeps one, after its call, as JSON.

        Raises:
            ColumnError: the state can't be written as JSON.
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

    def outputs(self, result: Any, columns: Mapping[str, Chunk], context: Context) -> list[Chunk]:
        """Return the columns that the op writes, from what its body returned for the ``columns`` read.

        Raises:
            ColumnError: one is not of its type, has other rows or tokens, or holds what is not finite.
        """
        outs = self.function.outs
        column_plans = self.plan.columns[self.scope.phase]
        may_return_none = bool(columns or self.function.holds) and not _has_rows(columns)
        is_single = [*outs] == [""]
        outputs = []
        for name, column in outs.items():
            value = result if is_single else getattr(result, name, None)
            if value is None and may_return_none:
                outputs.append(empty(column_plans[column]))
            else:
                outputs.append(self._wanted(column, columns, context).packed(value))
        rows, counts = split_counts(self.function, outputs)
        together(self._op_name, [outs[name] for name in rows], [*rows.values()])
        if counts is not None:
            name, output = next(iter(rows.items()))
            self._check_counts(counts, len(output), name, context)
        return outputs

    def _check_counts(self, counts: Chunk, rows: int, output: str, context: Context) -> None:
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

    @property
    def _op_name(self) -> str:
        return f"`{self.node}` ({self.function.target})"

    def _wanted(self, column: str, columns: Mapping[str, Chunk], context: Context) -> Wanted:
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

    def _lengths_wanted(self, column_plan: ColumnPlan, columns: Mapping[str, Chunk]) -> Any:
        """Return the tokens per row of a column that the op reads along the same tokens; None: any number."""
        if not column_plan.type.axis:
            return None
        plans = self.plan.columns[self.scope.phase]
        op = registry.load(self.function.target)
        aligned_ports = [port for port in op.inputs if port.type.axis == column_plan.type.axis]
        aligned_columns = {self.function.ins.get(port.name) for port in aligned_ports}
        for name, column in columns.items():
            if name in aligned_columns and plans[name].domain == column_plan.domain:
                return column.lengths
        return None

    def _rows_wanted(self, domain: str, columns: Mapping[str, Chunk], context: Context) -> int | None:
        """Return how many rows of a domain the op has to write; None: any number."""
        plans = self.plan.columns[self.scope.phase]
        domains = self.plan.domains[self.scope.phase]
        rows_by_domain = {plans[name].domain: len(column) for name, column in columns.items()}
        if domain in rows_by_domain:
            return rows_by_domain[domain]
        written = domains[domain]
        if written.parent in rows_by_domain:
            if written.most:
                return None
            finished_rows = context.rows if context.whole is None else context.whole
            return written.times * len(finished_rows)
        for read_domain, rows in rows_by_domain.items():  # one that the op reads may be made of it
            rows_per_ancestor = 1
            for ancestor in ancestors(domains, read_domain):
                if ancestor.name == domain:
                    return rows // rows_per_ancestor
                rows_per_ancestor *= ancestor.times
        if self.scope.requested_rows is None:
            return None
        # the rounds of a region are numbered by what they ask of their source
        return self.scope.requested_rows * registry.load(self.function.target).declared.of_each


def _has_rows(columns: Mapping[str, Chunk]) -> bool:
    return any(len(column) for column in columns.values())


def split_counts(function: Function, outputs: Sequence[Chunk]) -> tuple[dict[str, Chunk], Chunk | None]:
    """Return the columns of new rows by the op's names, and that of counts, if the op returns one."""
    rows = dict(zip(function.outs, outputs, strict=True))
    counts_name = registry.load(function.target).declared.counts
    counts = rows.pop(counts_name, None) if counts_name else None
    return rows, counts


def row_report(function: Function, outputs: Sequence[Chunk]) -> dict[str, Any]:
    """Return what a report says of the rows that an op wrote: lengths, counts, which a filter keeps."""
    if not outputs:
        return {}
    rows, counts = split_counts(function, outputs)
    report = {"lengths": row_lengths([*rows.values()])}
    if registry.load(function.target).declared.filters:
        report["selected"] = np.flatnonzero(outputs[0].near().values)
    if counts is not None:
        report["counts"] = counts.near().values
    return report
