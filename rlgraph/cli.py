"""The command line. Only command bodies reach outward, so that checking needs neither torch nor ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from rlgraph import __version__
from rlgraph.errors import RlgraphError

GRAPH = click.argument("graph")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
OUTPUT = click.option(
    "-o", "--output", type=click.File("w", encoding="utf-8"), default="-", help="Write to a file."
)
DEVICES = click.option("--devices", type=click.IntRange(min=1), help="Plan for this many devices.")


class Commands(click.Group):
    """Prints a user's mistake without a traceback, and lists commands in the order of use."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RlgraphError as error:
            click.echo(str(error), err=True)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlgraph")
def main() -> None:
    """Compile and run reinforcement-learning post-training, written as a graph.

    GRAPH is a path, or the name of a shipped graph (see `rlgraph graphs`). KEY=VALUE changes a value in it,
    as rollout.n=8 or models.policy.path=DIR.
    """


@main.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option("--steps", type=click.IntRange(min=0), help="Stop after this many iterations in all.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run is kept  [runs/<graph>]")
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir from its last checkpoint.")
@click.option(
    "--address", help="Join a Ray cluster: its address, or auto. Default: start Ray on this machine."
)
@click.option(
    "--inline", is_flag=True, help="All in this process, on one device, without Ray: for a debugger."
)
def run(graph: str, overrides: Sequence[str], devices: int | None, **options: Any) -> None:
    """Compile a graph and train."""
    from rlgraph.runtime.run import run_graph

    if options["inline"]:
        devices = 1
    run_graph(graph, overrides, devices, **options)


@main.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def check(ctx: click.Context, graph: str, overrides: Sequence[str], devices: int | None, form: str) -> None:
    """Find every error of a graph, starting nothing."""
    from rlgraph.check import check_report
    from rlgraph.compiler import compile_graph

    if form == "json":
        report = check_report(graph, overrides, devices)
        click.echo(json.dumps(report, indent=2))
        ctx.exit(0 if report["ok"] else 1)
    plan = compile_graph(graph, overrides, devices)
    for name in plan.open_values:
        click.echo(f"still open: {name} (give it as {name}=...)")
    click.echo(f"{plan.graph}: ok, {len(plan.steps)} steps an iteration")


@main.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@OUTPUT
def plan(graph: str, overrides: Sequence[str], devices: int | None, form: str, output: TextIO) -> None:
    """Show what will run, step by step."""
    from rlgraph.compiler import compile_graph
    from rlgraph.text import plan_text

    made = compile_graph(graph, overrides, devices)
    click.echo(plan_text(made) if form == "text" else made.json() + "\n", file=output, nl=False)


@main.command()
@GRAPH
@OVERRIDES
@click.option("--origin", is_flag=True, help="Mark each value with the place that it came from.")
@click.option("--column", help="Show instead who writes and reads this column, and when it is freed.")
@DEVICES
def show(graph: str, overrides: Sequence[str], origin: bool, column: str | None, devices: int | None) -> None:
    """Show the composed graph, or one of its columns."""
    from rlgraph.compose import compose
    from rlgraph.text import show_text

    if column is not None and origin:
        raise click.UsageError("--origin is of the graph, --column of the plan: give one of them")
    if column is None:
        click.echo(show_text(compose(graph, overrides), origin), nl=False)
        return
    from rlgraph.compiler import compile_graph
    from rlgraph.lineage import lineage_text

    click.echo(lineage_text(compile_graph(graph, overrides, devices), column), nl=False)


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--format", "form", type=click.Choice(["text", "yaml"]), default="text", show_default=True)
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, form: str) -> None:
    """Show what turns graph A into graph B, as edits.

    Exits with 0 where they are the same, with 1 where they differ.
    """
    from rlgraph.compose import as_written
    from rlgraph.diff import diff_text, diff_trees, diff_yaml

    old, new = as_written(a), as_written(b)
    edits = diff_trees(old, new)
    click.echo(diff_yaml(edits) if form == "yaml" else diff_text(old, new), nl=False)
    ctx.exit(1 if edits else 0)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> None:
    """Show where a run's time went and what it reached."""
    from rlgraph.report import report_text

    click.echo(report_text(run_dir), nl=False)


@main.command()
@click.argument("name", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "jsonschema"]),
    default="text",
    show_default=True,
    help="jsonschema: of the whole graph language, for editors.",
)
@OUTPUT
def nodes(name: str | None, form: str, output: TextIO) -> None:
    """List the ops and losses, or show one's declaration and docs; NAME may be my_ops.py:name."""
    from rlgraph.describe import catalog_text, describe, entry_of
    from rlgraph.reference import entry_markdown, reference
    from rlgraph.schema import graph_schema

    if name and form == "jsonschema":
        raise click.UsageError("the JSON schema is of the whole language; leave NAME out")
    if form == "jsonschema":
        text = json.dumps(graph_schema(), indent=1) + "\n"
    elif form == "markdown":
        text = entry_markdown(entry_of(name)) + "\n" if name else reference()
    else:
        text = describe(name) if name else catalog_text()
    click.echo(text, file=output, nl=False)


@main.command()
def graphs() -> None:
    """List the shipped graphs."""
    from rlgraph.compose import compose
    from rlgraph.shipped import shipped_graphs

    for name in shipped_graphs():
        about = compose(name).get("about")
        click.echo(f"{name:<10}  {about.value if about else ''}")


if __name__ == "__main__":
    sys.exit(main())
