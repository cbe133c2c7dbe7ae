"""Metrics of the columns that an op writes, so that rewards and filters of anybody are measured.

    my_reward ─> rewards ─> advantages       a node reads the column as `rewards`: reward/mean, std, min, max
    my_filter ─> which rows stay             NODE/kept

A name that the op records itself stays as the op recorded it: nothing is counted twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import SPREAD, registry
from rlgraph.ops.interfaces import Context
from rlgraph.runtime.columns.chunk import Chunk, unpack

PORT = "rewards"
PORTS = re.compile(r"rewards(_\d+)?")  # rewards, rewards_2, ...
MAIN = "reward/"  # the beginning of the metrics of a graph's main reward
FAILED = "failed"  # the output of an op that says which samples have no reward
ROUTE = "rlgraph.nodes.select.route:route"  # the op behind `rows: {by: COLUMN}`, whose name no graph has


def reward_prefixes(plan: Plan) -> dict[str, str]:
    """Return the columns that training reads as rewards, each with the beginning of its metrics' names.

    A column counts that a training node reads as ``rewards``, ``rewards_2``, ...; what filters read counts
    where no other node reads any, as in rejection sampling. The metrics of a column that is read as
    ``rewards`` begin with ``reward/``, those of the others with ``COLUMN/reward/``. Rows that a node holds
    were measured in the iteration in which they came.
    """
    functions = plan.functions["train"]
    filters = {node for node, function in functions.items() if _is_filter(function)}
    prefixes = _read_as_rewards(plan, functions.keys() - filters) or _read_as_rewards(plan, filters)
    of_held_rows = set[str]()
    for function in functions.values():
        if function.holds:
            of_held_rows.update(function.outs.values())
    return {column: prefix for column, prefix in prefixes.items() if column not in of_held_rows}


def _read_as_rewards(plan: Plan, readers: Collection[str]) -> dict[str, str]:
    """Return the columns that these nodes read as rewards, as ``reward_prefixes`` does."""
    columns = plan.columns["train"]
    ports_of = dict[str, set[str]]()
    for node, function in plan.functions["train"].items():
        if node not in readers:
            continue
        for port, name in function.ins.items():
            if PORTS.fullmatch(port) and columns[name].type.dtype == "float32":
                ports_of.setdefault(columns[name].origin, set()).add(port)
    # a graph may map another number to a port, by `in`; the column of the port's own name comes first
    main_columns = [column for column, ports in ports_of.items() if PORT in ports]
    named_so = [column for column in main_columns if columns[column].graph_name == PORT]
    prefixes = {}
    for column in ports_of:
        is_main = column in (named_so or main_columns)
        prefixes[column] = MAIN if is_main else f"{columns[column].graph_name}/{MAIN}"
    return prefixes


def record_written(
    context: Context,
    plan: Plan,
    function: Function,
    written: Mapping[str, Chunk],
) -> None:
    """Record the metrics of what an op of training wrote: of rewards, and of which rows a filter keeps.

    Args:
        context: of the call; what the op recorded itself is in it already.
        plan: of the run.
        function: the op.
        written: its columns, by their names in the plan.
    """
    if not any(len(chunk) for chunk in written.values()):
        return
    if _is_filter(function):
        (kept,) = written.values()
        _record(context, "kept", unpack(kept.near()), "share", context.over)
        return
    failed = _failed(plan, function, written)
    for column, prefix in _rewards_written(context, plan, written):
        over = plan.domain("train", column).kind
        mean = context.metrics.get(f"{prefix}mean")
        is_of_other_rows = mean is not None and mean.over != over
        is_complete = all(f"{prefix}{kind}" in context.metrics for kind in SPREAD)
        if is_of_other_rows or is_complete:
            continue
        rewards = unpack(written[column].near())
        if isinstance(rewards, Ragged):  # of each token: a sample earns their sum
            rewards = rewards.like(rewards.values.double()).sum()
        if failed is not None and len(failed) == len(rewards):
            rewards = rewards[~failed]
            _record(context, f"{prefix}failed", failed, "share", over)
        for kind in SPREAD:
            _record(context, f"{prefix}{kind}", rewards, kind, over)


def _rewards_written(context: Context, plan: Plan, written: Mapping[str, Chunk]) -> list[tuple[str, str]]:
    """Return the rewards among an op's columns, each with the beginning of its metrics' names.

    One column alone begins with ``reward/``. If the op has recorded that name itself, it is the first one.
    """
    prefixes = {column: prefix for column, prefix in reward_prefixes(plan).items() if column in written}
    main_column = next((column for column, prefix in prefixes.items() if prefix == MAIN), None)
    if main_column is None and f"{MAIN}mean" in context.metrics:
        main_column = next(iter(prefixes), None)
    rewards = []
    for column in prefixes:
        own_name = f"{plan.columns['train'][column].graph_name}/{MAIN}"
        rewards.append((column, MAIN if column == main_column else own_name))
    return rewards


def _failed(plan: Plan, function: Function, written: Mapping[str, Chunk]) -> Any:
    """Return which rows have no reward, as the op's output ``failed`` says; None where it has none."""
    column = function.outs.get(FAILED)
    if column is None or str(plan.columns["train"][column].type) != "boolean[samples]":
        return None
    return unpack(written[column].near())


def _record(context: Context, name: str, values: Any, kind: str, over: str) -> None:
    """Record a metric, unless the op has recorded this name."""
    full_name = name if "/" in name else f"{context.node}/{name}"
    if full_name not in context.metrics:
        context.record(name, values, kind=kind, over=over)


def _is_filter(function: Function) -> bool:
    return function.target != ROUTE and registry.load(function.target).declared.filters
