"""The command that checks a graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rlgraph.cli.options import (
    DEVICES,
    GRAPH,
    NO_CODE,
    OVERRIDES,
    STRICT,
    TOO_MANY,
    form_option,
    say,
    target_options,
)

if TYPE_CHECKING:
    from rlgraph.check import Look
    from rlgraph.ir.plan import Plan, Target
    from rlgraph.syntax.source import Tree


@click.command()
@GRAPH
@OVERRIDES
@DEVICES
@form_option("text", "json")
@click.option("--files", is_flag=True, help="Look at models, data and tools too, as a run does first.")
@target_options
@STRICT
@NO_CODE
@click.pass_context
def check(
    ctx: click.Context,
    graph: str,
    overrides: Sequence[str],
    devices: int | None,
    form: str,
    files: bool,
    target: Target | None,
    strict: bool,
) -> None:
    """Find every error of a graph, and what it likely does not mean, without models, data or devices.

    Where neither the graph nor an option says how many devices there are, it is checked with so many that the
    groups of its engines fit: on every machine alike.

    Python files that the graph names are loaded, which runs them; --no-code refuses them.
    """
    from rlgraph.check import check_graph, check_report

    if devices and target:
        raise click.UsageError(TOO_MANY)
    look: Look | None = None
    lengths: list[int | None] = []
    if files:
        from rlgraph.runtime.preflight import preflight

        def look(plan: Plan, tree: Tree) -> None:
            lengths.append(preflight(plan, tree))

    if form == "json":
        report = check_report(graph, overrides, devices, target, look, strict)
        click.echo(json.dumps(report, indent=2))
        ctx.exit(0 if report["ok"] else 1)
    plan, warnings = check_graph(graph, overrides, devices, target, look, strict)
    for name in plan.open_values:
        say(f"still open: {name} (give it as {name}=...)")
    on = ", ".join(f"{size} devices in pool `{name}`" for name, size in plan.pools.items())
    where = f" on {on}" * (max(plan.pools.values()) > 2)
    count = f", {len(warnings)} warning{'s' * (len(warnings) > 1)}" if warnings else ""
    length = "".join(f", {iterations} iterations" for iterations in lengths if iterations)
    say(f"{plan.graph}: ok, {len(plan.steps)} steps per iteration{where}{length}{count}")
    for warning in warnings:
        say(f"\n{warning.render()}")
