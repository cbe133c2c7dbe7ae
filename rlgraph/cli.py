"""The command line. Only command bodies reach outward, so that checking needs neither torch nor ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from rlgraph import __version__
from rlgraph.errors import RlgraphError

GRAPH = click.argument("graph")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
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
def check(graph: str, overrides: Sequence[str], devices: int | None) -> None:
    """Find every error of a graph, starting nothing."""
    from rlgraph.compiler import compile_graph

    plan = compile_graph(graph, overrides, devices)
    for name in plan.open_values:
        click.echo(f"still open: {name} (give it as {name}=...)")
    click.echo(f"{plan.graph}: ok, {len(plan.steps)} steps an iteration")


@main.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.File("w", encoding="utf-8"), default="-", help="Write to a file.")
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
def show(graph: str, overrides: Sequence[str], origin: bool) -> None:
    """Show the composed graph."""
    from rlgraph.compose import compose
    from rlgraph.text import show_text

    click.echo(show_text(compose(graph, overrides), origin), nl=False)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> None:
    """Show where a run's time went and what it reached."""
    from rlgraph.report import report_text

    click.echo(report_text(run_dir), nl=False)


@main.command()
@click.argument("name", required=False)
def nodes(name: str | None) -> None:
    """List the ops, or show one's declaration and docs."""
    from rlgraph.catalog import describe, known_ops, summary

    if name:
        click.echo(describe(name))
    else:
        width = max(map(len, known_ops()))
        for op in known_ops():
            click.echo(f"{op:<{width}}  {summary(op)}")


@main.command()
def graphs() -> None:
    """List the shipped graphs."""
    from rlgraph.compose import compose, shipped_graphs

    for name in shipped_graphs():
        about = compose(name).get("about")
        click.echo(f"{name:<10}  {about.value if about else ''}")


if __name__ == "__main__":
    sys.exit(main())
