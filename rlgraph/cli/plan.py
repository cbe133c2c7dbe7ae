"""Commands about a graph and its plan, which start no run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from rlgraph.cli import options
from rlgraph.units import plural

if TYPE_CHECKING:
    from rlgraph.check import Look
    from rlgraph.compiler import Compilation
    from rlgraph.errors import Problem
    from rlgraph.ir.plan import Plan
    from rlgraph.request import PlanRequest
    from rlgraph.view.drawings.drawing_options import DrawingOptions


@click.command()
@options.GRAPH
@options.OVERRIDES
@options.DEVICES
@options.form_option("text", "json")
@click.option(
    "--files", is_flag=True, help="Also check models, data and tools, as a run does before it starts."
)
@options.without_plugins
@options.request_options
@options.STRICT
@options.NO_CODE
@click.pass_context
def check(
    ctx: click.Context,
    request: PlanRequest,
    form: str,
    files: bool,
    strict: bool,
) -> None:
    """Report every error in a graph, and settings that probably do something unintended; needs no model.

    If neither the graph nor an option gives the number of devices, the smallest count of at least two that
    all group sizes divide is assumed, so the answer is the same on every machine.

    Python files that the graph names are loaded, which runs them; --no-code refuses to load them.
    """
    from rlgraph.check import check_graph, check_report

    if request.devices and request.target:
        raise click.UsageError(options.TOO_MANY)
    look: Look | None = None
    lengths: list[int | None] = []
    unchecked: list[str] = []
    if files:
        from rlgraph.runtime.preflight import preflight

        def look(compilation: Compilation) -> Sequence[Problem]:
            findings = preflight(compilation.plan, compilation.tree, strict)
            lengths.append(findings.iterations)
            unchecked.extend(findings.unchecked)
            return [*findings.warnings]

    if form == "json":
        report = check_report(request, look, strict)
        click.echo(json.dumps(report, indent=2))
        ctx.exit(0 if report["ok"] else 1)
    plan, warnings = check_graph(request, look, strict)
    for name in plan.open_values:
        options.say(f"still open: {name} (give it as {name}=...)")
    options.say(_summary(plan, lengths, len(warnings)))
    for sentence in unchecked:
        options.say(sentence)
    for warning in warnings:
        options.say(f"\n{warning.render()}")


def _summary(plan: Plan, lengths: Sequence[int | None], warnings: int) -> str:
    summary = f"{plan.graph}: ok, {len(plan.steps)} steps per iteration"
    if max(plan.pools.values()) > 2:
        pools = ", ".join(f"{size} devices in pool `{name}`" for name, size in plan.pools.items())
        summary += f" on {pools}"
    for iterations in lengths:
        if iterations:
            summary += f", {iterations} iterations"
    if warnings:
        summary += f", {warnings} {plural('warning', warnings)}"
    return summary


def _print_schema(ctx: click.Context, option: click.Parameter, is_set: bool) -> None:
    if is_set:
        from rlgraph.reports.plan_file import plan_schema

        click.echo(json.dumps(plan_schema(), indent=1))
        ctx.exit()


# of a file that -o names
FORMS = {".json": "json", ".html": "html", ".dot": "dot", ".mmd": "mermaid", ".svg": "svg", ".png": "png"}
PICTURES = ("svg", "png", "dot", "mermaid")


@click.command()
@options.GRAPH
@options.OVERRIDES
@options.DEVICES
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "mermaid", "dot", "svg", "png", "html", "trace"]),
    help="Default: by the name of the file after -o (.json, which `rlgraph run` takes, .html, .dot, .mmd, "
    ".svg, .png), else text. mermaid, dot, svg and png (through graphviz) draw the graph, html is the page "
    "of `rlgraph view`, trace is for ui.perfetto.dev.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Show only the differences from this saved plan; exit with 0 if there are none, else with 1.",
)
@options.without_plugins
@options.request_options
@click.option(
    "--autoplace",
    is_flag=True,
    help="Search pools, groups and micro-batches for the fastest placement on --cluster; -o saves its plan.",
)
@click.option(
    "--brief",
    is_flag=True,
    help="Show only what matters for decisions: times, GPU-hours, memory, and the bottleneck.",
)
@options.drawing_options
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Show the JSON Schema of a plan and exit.",
)
@options.NO_CODE
@options.OUTPUT
@click.pass_context
def plan(
    ctx: click.Context,
    request: PlanRequest,
    form: str | None,
    against: Path | None,
    output: TextIO,
    autoplace: bool,
    brief: bool,
    drawn: DrawingOptions,
) -> None:
    """Show what will run, step by step; GRAPH may also be a saved plan.

    Python files that the graph names are loaded, which runs them; --no-code refuses to load them.
    """
    from rlgraph.view.drawings.drawing_options import SHOWN

    if form is None:
        form = FORMS.get(Path(output.name).suffix, "text")
    if form not in PICTURES and drawn != SHOWN:
        raise click.UsageError(f"--types, --inserted and --direction are for pictures: {', '.join(PICTURES)}")
    if against and form != "text":
        raise click.UsageError(f"--against prints text: leave out --format {form}, and .json after -o")
    old: Plan | None = None
    if against:
        from rlgraph.reports.plan_file import load

        old = load(against)
    compilation: Compilation | None = None
    if autoplace:
        compilation = _best_layout(request)
    elif not options.is_saved(request):
        compilation = _compilation(request, old)
    new = compilation.plan if compilation else _saved_plan(request)
    if old:
        from rlgraph.printing.plan_diff import against_text

        text = against_text(old, new)
        options.say(text, file=output, nl=False)
        ctx.exit(1 if text else 0)
    if brief:
        options.echo(form, _brief(new, form), file=output)
    elif form in ("svg", "png"):
        _write_picture(new, form, drawn, output)
    elif form == "text":
        _write_text(new, output)
    else:
        from rlgraph.api import Planned

        write = getattr(Planned(new, compiled=compilation is not None), form)
        text = write(**vars(drawn)) if form in PICTURES else write()
        click.echo(text, file=output, nl=False)
    if compilation:
        for warning in compilation.warnings:
            options.say(f"\n{warning.render()}", err=True)


def _write_picture(plan: Plan, form: str, drawn: DrawingOptions, output: TextIO) -> None:
    from rlgraph.view.drawings.dot import picture

    content = picture(plan, form, drawn)  # before anything is written: an error leaves no empty file
    if form == "png" and output.isatty():
        raise click.UsageError("a png can't be shown in a terminal: name a file, as -o graph.png")
    output.buffer.write(content)


def _write_text(plan: Plan, output: TextIO) -> None:
    """Write a plan as text, in colours and as wide as the terminal if it goes to one."""
    from rlgraph.printing.plan_text import plan_text

    width = options.columns(output)
    if not width:
        click.echo(plan_text(plan), file=output, nl=False)
    elif "NO_COLOR" in os.environ:
        options.say(plan_text(plan, width=width), file=output, nl=False)
    else:
        from rlgraph.view.terminal import terminal_text

        click.echo(terminal_text(plan, width), nl=False)


def _brief(plan: Plan, form: str) -> str:
    """Return the headline of a plan, as text or as the JSON of the plan has it."""
    from rlgraph.printing.headline import headline_text

    if form not in ("text", "json"):
        raise click.UsageError("--brief prints text or json")
    if not (plan.predicted and plan.predicted.headline):
        raise click.UsageError("--brief needs a plan for a cluster: give --cluster")
    if form == "json":
        return json.dumps(plan.fields["predicted"]["headline"], indent=1)
    return "\n".join(headline_text(plan))


def _best_layout(request: PlanRequest) -> Compilation:
    """Return the compilation of the best placement that a search finds; print the findings beside it."""
    from rlgraph.autoplace import autoplace, offer
    from rlgraph.cli.search_progress import SearchProgress
    from rlgraph.search.text import contest_text

    if request.target is None or request.devices is not None or options.is_saved(request):
        raise click.UsageError("--autoplace takes a graph and --cluster, but not --devices")
    progress = SearchProgress(sys.stderr)
    try:
        candidates, best = autoplace(request, progress)
    finally:
        progress.close()
    streams = offer(request, candidates)
    options.say(contest_text(candidates, options.columns(sys.stderr) or 100, streams), err=True)
    return best


def _saved_plan(request: PlanRequest) -> Plan:
    """Return a saved plan as it is, or planned again for the cluster that is given."""
    from rlgraph.compiler import Compilation
    from rlgraph.reports.plan_file import load
    from rlgraph.request import PlanRequest

    saved = load(Path(request.graph))
    if request.target is None or saved.origin is None:
        return saved
    return Compilation(replace(PlanRequest.again(saved.origin), target=request.target)).plan


def _compilation(request: PlanRequest, old: Plan | None) -> Compilation:
    """Return the compilation of a graph; compared with an old plan, for as many devices as that had."""
    from rlgraph.compiler import Compilation
    from rlgraph.costs.detect import local_device

    if request.devices is not None and request.target:
        raise click.UsageError(options.TOO_MANY)
    request = replace(request, device=old.device if old else local_device())
    has_size = request.devices is not None or request.target is not None
    if old and old.origin and not has_size:
        request = replace(request, devices=old.origin.devices)
    return Compilation(request)


@click.command()
@options.GRAPH
@options.OVERRIDES
@click.option("--origin", is_flag=True, help="Mark each value with the place it came from.")
@click.option("--column", help="Show only which nodes write and read this column, and when it is freed.")
@click.option("--tree", is_flag=True, help="Show only the nodes, each below the nodes that it reads.")
@options.DEVICES
@options.NO_CODE
def show(
    graph: str, overrides: Sequence[str], origin: bool, column: str | None, tree: bool, devices: int | None
) -> None:
    """Show the composed graph, its nodes as a tree, or one of its columns."""
    from rlgraph.compiler import compile_graph
    from rlgraph.frontend.compose import compose
    from rlgraph.printing.column_text import lineage_text
    from rlgraph.syntax.yaml_text import show_text
    from rlgraph.view.terminal import WIDTH, tree_text

    if (column is not None) + origin + tree > 1:
        raise click.UsageError(
            "--origin shows the graph, --tree and --column show the plan: give only one of them"
        )
    if not tree and column is None:
        click.echo(show_text(compose(graph, overrides).written(), origin), nl=False)
        return
    plan = compile_graph(graph, overrides, devices)
    width = options.columns(sys.stdout) or WIDTH
    options.say(tree_text(plan, width) if column is None else lineage_text(plan, column), nl=False)


@click.command()
@click.argument("a", metavar="GRAPH|RUN")
@click.argument("b", metavar="GRAPH|RUN")
@options.form_option("text", "yaml")
@options.NO_CODE
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, form: str) -> None:
    """Show the edits that turn one graph into another.

    For two runs, given by their folders, show what they were started with, the edits, how their plans differ,
    and the last value of each metric in both.

    Exit with 0 if they are the same, with 1 if they differ.
    """
    import rlgraph.api
    from rlgraph.frontend.graph_diff import diff_yaml

    runs = [Path(name) for name in (a, b) if os.path.isfile(os.path.join(name, "plan.json"))]
    if len(runs) == 2 and form == "text":
        from rlgraph.reports.run_diff import run_diff

        text, is_different = run_diff(*runs)
        options.say(text, nl=False)
        ctx.exit(1 if is_different else 0)
    a, b = (_kept_graph(name) for name in (a, b))
    difference = rlgraph.api.diff(a, b)
    if form == "yaml":
        # its escapes are spelled out, and no line is broken
        click.echo(diff_yaml(difference.edits), nl=False)
    else:
        options.say(str(difference), nl=False)
    ctx.exit(1 if difference else 0)


def _kept_graph(name: str) -> str:
    """Return the graph that a run keeps if a folder of one is named, else the name."""
    from rlgraph.frontend.kept_graph import GRAPH

    kept = os.path.join(name, GRAPH)
    return kept if os.path.isfile(kept) else name
