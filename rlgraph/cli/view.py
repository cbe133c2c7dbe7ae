"""Commands that show a graph, a plan or a run to a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlgraph.cli.options import (
    DEVICES,
    NO_CODE,
    OVERRIDES,
    TOKENS,
    TOO_MANY,
    columns,
    echo,
    form_option,
    request_options,
    say,
)

if TYPE_CHECKING:
    from rlgraph.request import PlanRequest
    from rlgraph.view.subject import Subject


@click.command()
@click.argument("graph", metavar="GRAPH|PLAN|RUN")
@OVERRIDES
@DEVICES
@request_options
@click.option(
    "--against",
    metavar="GRAPH|PLAN|RUN",
    multiple=True,
    help="Also show the differences from this one, with the curves of both runs. Repeat it for more runs.",
)
@form_option("html", "trace", help="trace: a timeline for ui.perfetto.dev; for a run, with measured times.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file  [<graph>.html]")
@click.option("--serve", is_flag=True, help="Write no file: serve the page on this machine until Ctrl-C.")
@click.option("--follow", is_flag=True, help="With --serve: update the page while the run continues.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="For --serve.")
@NO_CODE
def view(
    request: PlanRequest,
    against: Sequence[str],
    form: str,
    output: Path | None,
    serve: bool,
    follow: bool,
    port: int,
) -> None:
    """Make a page that shows a graph, a saved plan or a run: one HTML file, to open in a browser.

    For a graph, the Python files that it names are loaded, which runs them; --no-code refuses to load them.
    """
    from rlgraph.view.contents import contents
    from rlgraph.view.page import page
    from rlgraph.view.subject import subject

    if follow and not serve:
        raise click.UsageError("--follow is for --serve")
    if request.devices is not None and request.target:
        raise click.UsageError(TOO_MANY)
    if serve and (output or form == "trace"):
        raise click.UsageError("--serve serves a page and writes no file: leave out -o and --format trace")
    new = subject(request)
    compared = [subject(replace(request, graph=other, overrides=())) for other in against]
    shown = [new, *compared]
    if len(shown) > 2 and not all(each.run_dir for each in shown):
        raise click.UsageError("several --against overlay the curves of runs: give only runs")
    if serve:
        _serve(request, compared, port, follow)
        return
    if form == "html":
        text, suffix, viewer = page(contents(new, *compared)), "html", "in a browser"
    else:
        text, suffix, viewer = _trace(new), "trace.json", "at ui.perfetto.dev"
    path = output or Path(f"{new.plan.graph}.{suffix}")
    path.write_text(text, encoding="utf-8")
    say(f"{path}: open it {viewer}")


def _serve(request: PlanRequest, compared: Sequence[Subject], port: int, follow: bool) -> None:
    from rlgraph.view.contents import contents
    from rlgraph.view.serve import server
    from rlgraph.view.subject import subject

    with server(lambda: contents(subject(request), *compared), port, follow) as serving:
        click.echo(f"http://127.0.0.1:{serving.server_port} (Ctrl-C to stop)")
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            click.echo()


def _trace(subject: Subject) -> str:
    """Return a timeline for ui.perfetto.dev; of a run with what was measured."""
    from rlgraph.reports.measured import metrics_so_far
    from rlgraph.view.recorded import read_timeline
    from rlgraph.view.trace import trace

    if subject.run_dir is None:
        return trace(subject.plan)
    return trace(subject.plan, read_timeline(subject.run_dir), metrics_so_far(subject.run_dir))


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the factor by which each kind of work took longer than predicted, for --calibration.",
)
@click.option(
    "--cluster",
    metavar="NAME_OR_FILE",
    help="Predict for this cluster, with the measured response lengths. Default: as the run was planned.",
)
@click.option("--prompt-tokens", type=TOKENS, help="Mean tokens per prompt, for --cluster and --calibrate.")
@form_option("text", "json")
def report(
    run_dir: Path, calibrate: Path | None, cluster: str | None, prompt_tokens: float | None, form: str
) -> None:
    """Show where a run's time went and what it reached, how far off predictions were, and what would help.

    To find what would help, its graph is planned again with one change at a time.
    """
    from rlgraph.reports.measured import Priced
    from rlgraph.reports.report import make_report, report_text

    if prompt_tokens and not (cluster or calibrate):
        raise click.UsageError("--prompt-tokens is for --cluster and --calibrate")
    if calibrate:
        calibrate.write_text(Priced.of(run_dir, cluster, prompt_tokens).calibration(), encoding="utf-8")
    run_report = make_report(run_dir, cluster, prompt_tokens)
    text = run_report.json() + "\n"
    if form == "text":
        text = report_text(run_report, columns(sys.stdout) or 100)
    echo(form, text, nl=False)
    if calibrate:
        click.echo(f"calibrated: rlgraph plan GRAPH --cluster ... --calibration {calibrate}", err=True)
