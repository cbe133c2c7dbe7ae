"""The command line. Only command bodies reach outward, so that checking needs neither torch nor ray."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from rlgraph import __version__
from rlgraph.errors import RlgraphError

if TYPE_CHECKING:
    from rlgraph.plan import Plan, Target

GRAPH = click.argument("graph")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
OUTPUT = click.option(
    "-o", "--output", type=click.File("w", encoding="utf-8"), default="-", help="Write to a file."
)
DEVICES = click.option("--devices", type=click.IntRange(min=1), help="Plan for this many devices.")

# of a file that -o names
FORMS = {".json": "json", ".html": "html", ".dot": "dot", ".mmd": "mermaid", ".svg": "svg", ".png": "png"}
TOKENS = click.FloatRange(min=1)
CLUSTER = click.option(
    "--cluster",
    metavar="NAME_OR_FILE",
    help="Plan for a cluster, as h100-8, or auto, this machine: predict times and memory, and move engines "
    "so that they fit.",
)
PROMPT_TOKENS = click.option("--prompt-tokens", type=TOKENS, help="Mean tokens of a prompt, for --cluster.")
RESPONSE_TOKENS = click.option(
    "--response-tokens", type=TOKENS, help="Mean tokens of a response, for --cluster."
)
CALIBRATION = click.option(
    "--calibration",
    type=click.Path(),
    metavar="FILE",
    help="Factors on the times, as `rlgraph report RUN --calibrate FILE` measured them, for --cluster.",
)


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


def _iterations(text: str | None) -> tuple[int, ...]:
    """Iterations as in ``3,4``."""
    words = text.split(",") if text else []
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise click.BadParameter(f"`{text}` is not iterations, counted from 1: write 3 or 3,4")
    return tuple(int(word) for word in words)


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
    "--inline", is_flag=True, help="All in this process, on one device a pool, without Ray: for a debugger."
)
@click.option(
    "--track",
    type=click.Choice(["wandb", "mlflow"]),
    multiple=True,
    help="Send metrics to this service too; it is set up by its own environment variables.",
)
@click.option(
    "--profile",
    callback=lambda ctx, option, text: _iterations(text),
    metavar="N[,N]",
    help="Trace what every worker computes in these iterations, counted from 1, by torch's profiler.",
)
@CLUSTER
@PROMPT_TOKENS
@RESPONSE_TOKENS
@CALIBRATION
def run(
    graph: str,
    overrides: Sequence[str],
    devices: int | None,
    cluster: str | None,
    prompt_tokens: float | None,
    response_tokens: float | None,
    calibration: str | None,
    **options: Any,
) -> None:
    """Compile a graph, or take a plan saved by `rlgraph plan GRAPH -o plan.json`, and train."""
    target = _target(cluster, prompt_tokens, response_tokens, calibration)
    saved = _is_saved(graph, overrides, devices, target)
    from rlgraph.runtime.run import run_graph

    if options["inline"] and not saved:
        devices = 1
    run_graph(graph, overrides, devices, target=target, **options)


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


def _target(
    cluster: str | None,
    prompt_tokens: float | None,
    response_tokens: float | None,
    calibration: str | None,
) -> Target | None:
    """What --cluster and its companions ask for."""
    from rlgraph.plan import Target

    if cluster is None:
        if prompt_tokens or response_tokens or calibration:
            raise click.UsageError("--prompt-tokens, --response-tokens and --calibration are for --cluster")
        return None
    return Target(cluster, prompt_tokens, response_tokens, calibration)


def _is_saved(
    graph: str, overrides: Sequence[str], devices: int | None, target: Target | None = None
) -> bool:
    """Whether a saved plan was given in place of a graph; it goes with no settings."""
    from rlgraph.planfile import SETTLED, is_plan

    saved = is_plan(graph)
    if saved and (overrides or devices or target):
        raise click.UsageError(f"{graph} {SETTLED}")
    return saved


def _print_schema(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        from rlgraph.planfile import plan_schema

        click.echo(json.dumps(plan_schema(), indent=1))
        ctx.exit()


@main.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "mermaid", "dot", "svg", "png", "html", "trace"]),
    help="Default: as the file behind -o is named (.json, which `rlgraph run` takes, .html, .dot, .mmd, "
    ".svg, .png), else text. mermaid, dot, svg and png (by graphviz) draw the graph, html is the page of "
    "`rlgraph view`, trace is for ui.perfetto.dev.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Show instead what is different from this saved plan: exit 0 for nothing, 1 for something.",
)
@CLUSTER
@PROMPT_TOKENS
@RESPONSE_TOKENS
@CALIBRATION
@click.option(
    "--autoplace",
    is_flag=True,
    help="Search pools, groups and micro-batches for the fastest layout on --cluster; -o saves its plan.",
)
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Show the JSON Schema of a plan and exit.",
)
@OUTPUT
@click.pass_context
def plan(
    ctx: click.Context,
    graph: str,
    overrides: Sequence[str],
    devices: int | None,
    form: str | None,
    against: Path | None,
    output: TextIO,
    cluster: str | None,
    prompt_tokens: float | None,
    response_tokens: float | None,
    calibration: str | None,
    autoplace: bool,
) -> None:
    """Show what will run, step by step; GRAPH may be a saved plan as well."""
    from rlgraph.planfile import load

    if form is None:
        form = FORMS.get(Path(output.name).suffix, "text")
    if against and form != "text":
        raise click.UsageError(f"--against prints words: leave out --format {form}, and .json behind -o")
    old = load(against) if against else None
    target = _target(cluster, prompt_tokens, response_tokens, calibration)
    if autoplace:
        made = _placed(graph, overrides, devices, target)
    else:
        made = _made(graph, overrides, devices, old, target)
    if old:
        from rlgraph.against import against_text

        text = against_text(old, made)
        click.echo(text, file=output, nl=False)
        ctx.exit(1 if text else 0)
    if form in ("svg", "png"):
        from rlgraph.view.picture import picture

        drawn = picture(made, form)  # first: what can't be drawn leaves no empty file
        if form == "png" and output.isatty():
            raise click.UsageError("a png is nothing for a terminal: name a file, as -o graph.png")
        output.buffer.write(drawn)
        return
    if form == "text" and output.isatty() and "NO_COLOR" not in os.environ:
        from rlgraph.view.terminal import terminal_text

        click.echo(terminal_text(made), nl=False)
        return
    click.echo(_rendered(made, form, compiled=not _is_saved(graph, (), None)), file=output, nl=False)


def _rendered(plan: Plan, form: str, compiled: bool) -> str:
    """A plan in one of its forms; ``compiled``: just now, with its ops' files loaded."""
    from rlgraph.text import plan_text
    from rlgraph.view.contents import contents
    from rlgraph.view.dot import dot
    from rlgraph.view.given import Given
    from rlgraph.view.mermaid import mermaid
    from rlgraph.view.page import page
    from rlgraph.view.trace import trace

    if form == "html":
        return page(contents(Given(plan, compiled=compiled)))
    forms: dict[str, Callable[[Plan], str]] = {
        "text": plan_text,
        "mermaid": mermaid,
        "dot": dot,
        "trace": trace,
    }
    return forms[form](plan) if form in forms else plan.json() + "\n"


def _placed(graph: str, overrides: Sequence[str], devices: int | None, target: Target | None) -> Plan:
    """The best plan that a search finds; what it found is told beside the plan."""
    from rlgraph.autoplace import autoplace
    from rlgraph.contest import contest_text

    if target is None or devices is not None or _is_saved(graph, (), None):
        raise click.UsageError("--autoplace takes a graph and --cluster, and no --devices")
    found, made = autoplace(graph, overrides, target)
    click.echo(contest_text(found), err=True)
    return made


def _made(
    graph: str, overrides: Sequence[str], devices: int | None, old: Plan | None, target: Target | None
) -> Plan:
    """The plan that was asked for; beside an old one, and with no other number, for as many devices.

    A saved plan is shown as it is, or planned again for the cluster that is given.
    """
    from rlgraph.compiler import compile_graph
    from rlgraph.planfile import load

    if devices is not None and target:
        raise click.UsageError("--cluster says how many devices there are: leave out --devices")
    if _is_saved(graph, overrides, devices):
        saved = load(Path(graph))
        if target is None or saved.origin is None:
            return saved
        origin = saved.origin
        return compile_graph(origin.graph, origin.overrides, origin.devices, target)
    if devices is None and old and old.origin and not target:
        devices = old.origin.devices
    return compile_graph(graph, overrides, devices, target)


@main.command()
@GRAPH
@OVERRIDES
@click.option("--origin", is_flag=True, help="Mark each value with the place that it came from.")
@click.option("--column", help="Show instead who writes and reads this column, and when it is freed.")
@click.option("--tree", is_flag=True, help="Show instead the nodes, each below what it reads.")
@DEVICES
def show(
    graph: str, overrides: Sequence[str], origin: bool, column: str | None, tree: bool, devices: int | None
) -> None:
    """Show the composed graph, its nodes as a tree, or one of its columns."""
    from rlgraph.compose import compose
    from rlgraph.text import show_text

    if (column is not None) + origin + tree > 1:
        raise click.UsageError("--origin is of the graph, --tree and --column of the plan: give one of them")
    if tree:
        from rlgraph.compiler import compile_graph
        from rlgraph.view.tree import tree_text

        click.echo(tree_text(compile_graph(graph, overrides, devices)), nl=False)
        return
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
@click.argument("shown", metavar="GRAPH|PLAN|RUN")
@OVERRIDES
@DEVICES
@CLUSTER
@PROMPT_TOKENS
@RESPONSE_TOKENS
@CALIBRATION
@click.option("--against", metavar="GRAPH|PLAN|RUN", help="Show also what is different from this one.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "trace"]),
    default="html",
    show_default=True,
    help="trace: a timeline for ui.perfetto.dev, of a run with what was measured.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file  [<graph>.html]")
@click.option("--serve", is_flag=True, help="Write no file: serve the page on this machine until Ctrl-C.")
@click.option("--follow", is_flag=True, help="With --serve: the page shows a run as it goes on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="For --serve.")
def view(
    shown: str,
    overrides: Sequence[str],
    devices: int | None,
    cluster: str | None,
    prompt_tokens: float | None,
    response_tokens: float | None,
    calibration: str | None,
    against: str | None,
    form: str,
    output: Path | None,
    serve: bool,
    follow: bool,
    port: int,
) -> None:
    """Make a page of a graph, a saved plan or a run: one HTML file, to open in a browser."""
    from rlgraph.view.contents import contents
    from rlgraph.view.given import given
    from rlgraph.view.page import page
    from rlgraph.view.recorded import metrics_so_far, read_timeline
    from rlgraph.view.trace import trace

    if follow and not serve:
        raise click.UsageError("--follow is for --serve")
    if devices is not None and cluster:
        raise click.UsageError("--cluster says how many devices there are: leave out --devices")
    if serve and (output or form == "trace"):
        raise click.UsageError("--serve writes no file and serves a page: leave out -o and --format trace")
    target = _target(cluster, prompt_tokens, response_tokens, calibration)
    settled = (overrides, devices, target)
    new, old = given(shown, *settled), given(against, (), devices, target) if against else None
    if serve:
        _serve(lambda: contents(given(shown, *settled), old), port, follow)
        return
    if form == "trace":
        folder = new.run_dir
        text = trace(new.plan, *((read_timeline(folder), metrics_so_far(folder)) if folder else ()))
    else:
        text = page(contents(new, old))
    path = output or Path(f"{new.plan.graph}.{'html' if form == 'html' else 'trace.json'}")
    path.write_text(text, encoding="utf-8")
    click.echo(f"{path}: open it in a browser" if form == "html" else f"{path}: open it at ui.perfetto.dev")


def _serve(make: Callable[[], dict[str, Any]], port: int, follow: bool) -> None:
    from rlgraph.view.serve import server

    with server(make, port, follow) as serving:
        click.echo(f"http://127.0.0.1:{serving.server_port} (Ctrl-C to stop)")
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            click.echo()


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write by which factor each kind of work took longer than predicted, for --calibration.",
)
@click.option(
    "--cluster",
    metavar="NAME_OR_FILE",
    help="Predict for this cluster, with responses as long as they were. Default: as the run was planned.",
)
@click.option("--prompt-tokens", type=TOKENS, help="Mean tokens of a prompt, for --cluster and --calibrate.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def report(
    run_dir: Path, calibrate: Path | None, cluster: str | None, prompt_tokens: float | None, form: str
) -> None:
    """Show where a run's time went and what it reached, how far off predictions were, and what would help.

    For the latter its graph is planned again, with one change at a time.
    """
    from rlgraph.measured import Priced
    from rlgraph.report import as_text, make_report

    if prompt_tokens and not (cluster or calibrate):
        raise click.UsageError("--prompt-tokens is for --cluster and --calibrate")
    if calibrate:
        calibrate.write_text(Priced.of(run_dir, cluster, prompt_tokens).calibration(), encoding="utf-8")
    made = make_report(run_dir, cluster, prompt_tokens)
    click.echo(as_text(made) if form == "text" else made.json() + "\n", nl=False)
    if calibrate:
        click.echo(f"calibrated: rlgraph plan GRAPH --cluster ... --calibration {calibrate}", err=True)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), required=True, help="The directory to make.")
@click.option("--model", metavar="NAME", help="Which, where the run trains several.")
@click.option("--checkpoint", metavar="NAME", help="As step-000100  [the last one]")
def export(run_dir: Path, to: Path, model: str | None, checkpoint: str | None) -> None:
    """Write a model of a run's checkpoint as a directory that transformers loads."""
    from rlgraph.runtime.export import export

    click.echo(f"wrote {export(run_dir, to, model, checkpoint)}")


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", "iteration", type=click.IntRange(min=1), required=True, help="Which iteration.")
@click.option("--from", "node", metavar="NODE", required=True, help="The first node that runs again.")
@click.option("--export", type=click.Path(path_type=Path), metavar="DIR", help="Write the models after it.")
def replay(run_dir: Path, iteration: int, node: str, export: Path | None) -> None:
    """Run an iteration again from recorded columns, in this process, and compare what comes of it."""
    from rlgraph.runtime.replay import replay

    click.echo(str(replay(run_dir, iteration, node, export)), nl=False)


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
@click.option("--format", "form", type=click.Choice(["text", "markdown"]), default="text", show_default=True)
@OUTPUT
def graphs(form: str, output: TextIO) -> None:
    """List the shipped graphs, or write the page that shows each as an edit of another."""
    from rlgraph.algorithms import algorithms
    from rlgraph.compose import compose
    from rlgraph.shipped import shipped_graphs

    if form == "markdown":
        click.echo(algorithms(), file=output, nl=False)
        return
    width = max(len(name) for name in shipped_graphs())
    for name in shipped_graphs():
        about = compose(name).get("about")
        click.echo(f"{name:<{width}}  {about.value if about else ''}", file=output)


if __name__ == "__main__":
    sys.exit(main())
