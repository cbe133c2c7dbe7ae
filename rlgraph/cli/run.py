"""Commands that run something: a graph, an exported model, a replay, the checks of a machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlgraph.cli.options import DEVICES, OVERRIDES, STRICT, is_saved, request_options, say
from rlgraph.units import seconds_of

if TYPE_CHECKING:
    from rlgraph.request import PlanRequest


def _iterations(text: str | None) -> tuple[int, ...]:
    """Return the iterations of a text as ``3,4``."""
    words = text.split(",") if text else []
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise click.BadParameter(f"`{text}` is not a list of iterations, counted from 1: write 3 or 3,4")
    return tuple(int(word) for word in words)


def _seconds(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Return the seconds of a text as ``3h50m``."""
    seconds = seconds_of(text) if text else None
    if text and not seconds:
        raise click.BadParameter(f"`{text}` is not a duration: write 3h50m, 90m or 45s")
    return seconds


ADDRESS = click.option(
    "--address", help="Join a Ray cluster: its address, or auto. Default: start Ray on this machine."
)
INLINE = click.option(
    "--inline",
    is_flag=True,
    help="Run everything in this process, with one device per pool and without Ray; useful in a debugger.",
)
TRACK = click.option(
    "--track",
    metavar="NAME",
    multiple=True,
    help="Also send metrics and samples to wandb or mlflow, configured by their own environment variables, "
    "or to your own tracker: my_tracker.py:Name.",
)


KEEP_SETTINGS = click.option(
    "--keep-settings/--drop-settings",
    default=None,
    help="With --resume and GRAPH: keep or drop each KEY=VALUE that the run was started with but that is "
    "left out now. On a terminal you are asked.",
)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a run that it starts, or goes on with."""
    options = (
        click.option("--steps", type=click.IntRange(min=0), help="Stop after this many iterations in total."),
        click.option(
            "--time-limit",
            callback=_seconds,
            metavar="TIME",
            help="Begin no iteration after this time, such as 3h50m; save, and exit with 75. `rlgraph "
            "resume RUN` continues.",
        ),
        ADDRESS,
        INLINE,
        TRACK,
        click.option(
            "--metrics-port",
            metavar="[HOST:]PORT",
            help="Serve the latest metrics to Prometheus here, at /metrics; without HOST only on this "
            "machine.",
        ),
        click.option(
            "--profile",
            callback=lambda ctx, option, text: _iterations(text),
            metavar="N[,N]",
            help="Trace every worker in these iterations, counted from 1, with torch's profiler.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="The lowest level of messages that the run's processes write to logs/.",
        ),
        STRICT,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("graph", required=False, metavar="GRAPH|PLAN|RUN")
@OVERRIDES
@DEVICES
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the run  [runs/<graph>]")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --run-dir, or RUN, from its last checkpoint, as `rlgraph resume RUN` does.",
)
@click.option(
    "--resume-from",
    metavar="NAME",
    help="Continue from this checkpoint, such as step-000100 or best; everything after it is set aside.",
)
@KEEP_SETTINGS
@training_options
@request_options
def run(request: PlanRequest, keep_settings: bool | None, **options: Any) -> None:
    """Compile a graph and train.

    Instead of a graph, you can give a plan saved by `rlgraph plan GRAPH -o plan.json`, or the folder of a
    run, which is repeated with the same settings in a new folder. With --resume it continues instead.
    """
    resume = options["resume"] or options["resume_from"] is not None
    request = _with_subject(request, options["run_dir"] if resume else None)
    if is_saved(request) and request.target:
        from rlgraph.reports.plan_file import SETTLED

        raise click.UsageError(f"{request.graph} {SETTLED}")
    if resume and keep_settings is None and sys.stdin.isatty() and sys.stdout.isatty():
        keep_settings = _ask_for_settings(request, options["run_dir"])
    _train(request, keep_settings=keep_settings, **options)


@click.command()
@click.argument("graph", metavar="RUN")
@OVERRIDES
@DEVICES
@click.option(
    "--checkpoint",
    "resume_from",
    metavar="NAME",
    help="Continue from this checkpoint, such as step-000100 or best; everything after it is set aside  "
    "[the last one]",
)
@training_options
@request_options
def resume(request: PlanRequest, **options: Any) -> None:
    """Continue a run, given by its folder, with the graph, settings, devices and cluster that it had.

    KEY=VALUE changes a setting from the next iteration on.
    """
    from rlgraph.runtime.run import is_run

    if not is_run(os.path.join(".", request.graph)):
        from rlgraph.errors import RunError

        law = f"{request.graph} holds no run to resume (no plan.json)"
        raise RunError(
            f"{law}\n  name the folder of a run, such as runs/demo; to start a new run, use rlgraph run"
        )
    # a folder that is named as a shipped graph is meant, not the graph
    _train(replace(request, graph=os.path.join(".", request.graph)), resume=True, **options)


def _train(request: PlanRequest, **options: Any) -> None:
    from rlgraph.runtime.run import run_graph

    if options["inline"] and (request.devices or 1) > 1:
        law = f"--inline runs on one device, and --devices {request.devices} asks for more"
        raise click.UsageError(f"{law}: leave out one of them")
    run_graph(request.graph, request.overrides, request.devices, target=request.target, **options)


def _with_subject(request: PlanRequest, resumed: Path | None) -> PlanRequest:
    """Return a request that names a graph or a run: if it names none, the run to resume, of --run-dir."""
    words = [word for word in (request.graph, *request.overrides) if word]
    is_named = bool(words) and "=" not in words[0]
    if is_named:
        return request
    if resumed is None:
        raise click.UsageError("name a GRAPH, a saved plan or the folder of a RUN")
    return replace(request, graph=os.path.join(".", resumed), overrides=tuple(words))


def _ask_for_settings(request: PlanRequest, run_dir: Path | None) -> bool | None:
    """Ask whether settings are kept that a run was started with, and that are left out now."""
    from rlgraph.runtime.run import forgotten_settings

    missing = forgotten_settings(request.graph, request.overrides, run_dir)
    if not missing:
        return None
    settings = shlex.join(missing)
    return click.confirm(
        f"{run_dir} was started with {settings}, which is left out now. Keep it?", default=True
    )


@click.command("eval")
@click.argument("graph", metavar="RUN|GRAPH")
@OVERRIDES
@DEVICES
@click.option(
    "--checkpoint", metavar="NAME", help="Checkpoint of the run, such as step-000100 or best  [the last one]"
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Directory of the result  [runs/<graph>-eval]"
)
@ADDRESS
@INLINE
@TRACK
@request_options
def evaluate(request: PlanRequest, **options: Any) -> None:
    """Evaluate a checkpoint of a run, or the models of a graph, with models.policy.path=DIR.

    It measures what the graph's section `eval` describes; KEY=VALUE may change it.
    """
    from rlgraph.runtime.evaluate import evaluate

    evaluate(request.graph, request.overrides, request.devices, target=request.target, **options)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), required=True, help="The directory to create.")
@click.option("--model", metavar="NAME", help="The model to export, if the run trains several.")
@click.option("--checkpoint", metavar="NAME", help="Checkpoint, such as step-000100 or best  [the last one]")
def export(run_dir: Path, to: Path, model: str | None, checkpoint: str | None) -> None:
    """Write a model from a run's checkpoint to a directory that transformers can load."""
    from rlgraph.runtime.export import export

    say(f"wrote {export(run_dir, to, model, checkpoint)}")


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--step", "iteration", type=click.IntRange(min=1), required=True, help="The iteration to run again."
)
@click.option("--from", "node", metavar="NODE", required=True, help="The first node to run again.")
@click.option(
    "--export", type=click.Path(path_type=Path), metavar="DIR", help="Write the models after the iteration."
)
def replay(run_dir: Path, iteration: int, node: str, export: Path | None) -> None:
    """Run an iteration again from recorded columns, in this process, and compare the results."""
    from rlgraph.runtime.replay import replay

    say(str(replay(run_dir, iteration, node, export)), nl=False)


@click.command()
@click.argument("examined", required=False, metavar="[GRAPH|MODEL]")
@OVERRIDES
@click.option("--run-dir", default="runs", show_default=True, help="Where runs will be written.")
@click.option("--address", help="Also check this Ray cluster: its address, or auto.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120,
    show_default=True,
    help="Seconds that all checks together may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the lines, and the underlying facts, as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context, /, examined: str | None, overrides: Sequence[str], as_json: bool, **options: Any
) -> None:
    """Check this machine: versions, GPUs, memory, NCCL, disk, Ray, SGLang; and the models of a graph, or one.

    Each line is ok, warn or wrong, and says what to do. Exit with 1 if something is wrong.
    """
    from rlgraph.runtime.doctor.doctor import examine

    report = examine(_models(examined, overrides), **options)
    click.echo(json.dumps(report.data(), indent=1) + "\n" if as_json else report.text(), nl=False)
    ctx.exit(0 if report.fit else 1)


def _models(examined: str | None, overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return folders or names of models: that of the command line, or those that a graph names, with what it
    says of their files, as JSON."""
    from rlgraph.compiler import compile_graph
    from rlgraph.frontend.shipped import shipped_graphs
    from rlgraph.syntax.source import OPEN
    from rlgraph.variables import with_values

    if examined is None:
        return []
    is_graph = examined in shipped_graphs() or examined.endswith((".yaml", ".yml"))
    if not is_graph:
        if overrides:
            raise click.UsageError(f"`{examined}` is not a graph: KEY=VALUE is for graphs")
        return [(examined,)]
    arguments = []
    for model in compile_graph(examined, overrides).models.values():
        if model.path != OPEN:
            config = json.dumps(dict(model.config))
            trust = json.dumps(model.trust_remote_code)
            arguments.append((with_values(model.path), config, trust))
    return [*dict.fromkeys(arguments)]
