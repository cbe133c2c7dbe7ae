"""Options that several commands take."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click

from rlgraph.errors import fitted, visible

if TYPE_CHECKING:
    from rlgraph.request import PlanRequest


DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"  # the variable that pydantic reads
NARROWEST, WIDEST = 40, 120  # columns that text is fitted to: longer lines are hard to read


def columns(file: IO[Any]) -> int:
    """Return how many columns text for a terminal has, at least 40; 0 where a file is not a terminal."""
    if not file.isatty():
        return 0
    available = shutil.get_terminal_size((100, 24)).columns
    return min(max(available, NARROWEST), WIDEST)


def say(text: str, **options: Any) -> None:
    """Print text that may come from a graph, a plan or a run, with no control over the terminal.

    On a terminal its lines are broken to fit; all else gets them as they are.
    """
    standard = sys.stderr if options.get("err") else sys.stdout
    width = columns(options.get("file") or standard)
    text = visible(text)
    if width:
        text = fitted(text, width)
    click.echo(text, **options)


def echo(form: str, text: str, **options: Any) -> None:
    """Print text for people as ``say`` does, and any other ``form`` as tools read it."""
    if form == "text":
        say(text, **options)
    else:
        click.echo(text, **options)


GRAPH = click.argument("graph")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
OUTPUT = click.option(
    "-o", "--output", type=click.File("w", encoding="utf-8"), default="-", help="Write to a file."
)
DEVICES = click.option("--devices", type=click.IntRange(min=1), help="Plan for this many devices.")
STRICT = click.option("--strict", is_flag=True, help="Treat warnings about the graph as errors.")
SHARE = click.FloatRange(0, 1, min_open=True)
TOKENS = click.FloatRange(min=1)
TOO_MANY = "--cluster says how many devices there are: leave out --devices"


def form_option(*forms: str, help: str | None = None) -> Callable[[Any], Any]:
    """Return the option ``--format``, the first of these unless given, as the argument ``form``."""
    kinds = click.Choice(forms)
    return click.option("--format", "form", type=kinds, default=forms[0], show_default=True, help=help)


def _responses(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Return tokens of responses: their mean, percentiles by name, or both as a run has measured them."""
    if not text:
        return text
    if "=" in text:
        lengths = {}
        for percentile in text.split(","):
            name, _, tokens = percentile.partition("=")
            lengths[name.strip()] = TOKENS.convert(cast(Any, tokens), option, ctx)
        return lengths
    if Path(text).is_dir() or not text[0].isdigit():
        from rlgraph.reports.measured import measured_responses

        return measured_responses(Path(text))
    return TOKENS.convert(cast(Any, text), option, ctx)


def _shares(ctx: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, float]:
    """Return filter -> the share that it keeps, of ``best=0.03``, or ``0.5`` for all others."""
    shares = {}
    for text in texts:
        name, _, share = text.rpartition("=")
        shares[name] = float(SHARE.convert(cast(Any, share), option, ctx))
    return shares


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --cluster and its companions.

    With the graph, the overrides and the devices, which it has to take as well, they are the one argument
    ``request``.
    """

    @click.option(
        "--cluster",
        metavar="NAME_OR_FILE",
        help="Plan for a cluster, such as h100-8, or auto for this machine: predict times and memory, and "
        "move engines so that they fit. On a machine with GPUs the default is auto.",
    )
    @click.option("--prompt-tokens", type=TOKENS, help="Mean tokens per prompt, for --cluster.")
    @click.option(
        "--response-tokens",
        callback=_responses,
        metavar="TOKENS|PERCENTILES|RUN",
        help="Mean tokens per response, percentiles such as p50=800,p99=8000, or the folder of a run that "
        "has measured them. For --cluster.",
    )
    @click.option(
        "--calibration",
        type=click.Path(),
        metavar="FILE",
        help="Factors on predicted times, measured by `rlgraph report RUN --calibrate FILE`, for --cluster.",
    )
    @click.option(
        "--expert-imbalance",
        type=TOKENS,
        metavar="FACTOR",
        help="Tokens on the busiest of the devices that divide experts, relative to their mean, for "
        "--cluster.",
    )
    @click.option(
        "--kept-rows",
        multiple=True,
        callback=_shares,
        metavar="[FILTER=]SHARE",
        help="Share of rows that a filter keeps, or without FILTER every filter not named. Default: all "
        "rows. For --cluster.",
    )
    @click.option("--turns", type=TOKENS, help="Mean turns per conversation, for --cluster.")
    @click.option(
        "--tool-seconds",
        type=click.FloatRange(0),
        help="Seconds that tools take to answer a turn, for --cluster.",
    )
    @click.option(
        "--margin",
        type=click.FloatRange(0, 1, max_open=True),
        help="Share of a device's memory to leave free, for --cluster; 0.05 unless the cluster's file gives "
        "another.",
    )
    @functools.wraps(command)
    def with_request(
        *args: Any,
        graph: str,
        overrides: Sequence[str],
        devices: int | None,
        cluster: str | None,
        **options: Any,
    ) -> Any:
        from rlgraph.ir.plan import Target
        from rlgraph.request import PlanRequest

        names = [field.name for field in fields(Target) if field.name != "cluster"]
        details = {name: options.pop(name) for name in names}
        has_details = any(value not in (None, {}) for value in details.values())
        if cluster is None and has_details:
            *others, last = (f"--{name.replace('_', '-')}" for name in names)
            raise click.UsageError(f"{', '.join(others)} and {last} are for --cluster")
        target = Target(cluster, **details) if cluster else None
        return command(*args, request=PlanRequest(graph, overrides, devices, target), **options)

    return with_request


def without_plugins(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command run without pydantic's plugins, whatever the environment says of them.

    Pydantic looks for them in the metadata of all that is installed, which takes a 20th of a check. A command
    that starts processes or validates a user's data is not decorated: there a plugin may have work to do.
    """

    @functools.wraps(command)
    def run_without(*args: Any, **options: Any) -> Any:
        before = os.environ.get(DISABLE_PLUGINS)
        os.environ[DISABLE_PLUGINS] = "__all__"
        try:
            return command(*args, **options)
        finally:
            if before is None:
                del os.environ[DISABLE_PLUGINS]
            else:
                os.environ[DISABLE_PLUGINS] = before

    return run_without


def drawing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of pictures, as the one argument ``drawn``."""

    @click.option("--types", is_flag=True, help="In a picture, label arrows with the types of columns.")
    @click.option("--inserted", is_flag=True, help="In a picture, also show inserted steps.")
    @click.option(
        "--direction", type=click.Choice(["down", "right"]), default="down", help="Direction of a picture."
    )
    @functools.wraps(command)
    def with_options(*args: Any, types: bool, inserted: bool, direction: Any, **others: Any) -> Any:
        from rlgraph.view.drawings.drawing_options import DrawingOptions

        return command(*args, drawn=DrawingOptions(types, inserted, direction), **others)

    return with_options


def _refuse_code(ctx: click.Context, option: click.Parameter, is_set: bool) -> None:
    if is_set:
        from rlgraph.ops.registry import without_code

        ctx.with_resource(without_code())


NO_CODE = click.option(
    "--no-code",
    is_flag=True,
    expose_value=False,
    callback=_refuse_code,
    help="Refuse to load the Python files that a graph names. Loading a file runs it: use this for graphs "
    "that you don't trust.",
)


def is_saved(request: PlanRequest) -> bool:
    """Return whether a saved plan was given in place of a graph; it goes with no settings."""
    if not request.graph.endswith(".json"):
        return False
    from rlgraph.reports.plan_file import SETTLED, is_plan  # with all that plans a saved graph again

    saved = is_plan(request.graph)
    if saved and (request.overrides or request.devices):
        raise click.UsageError(f"{request.graph} {SETTLED}")
    return saved
