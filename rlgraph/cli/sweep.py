"""The command that runs a graph with several values of its settings."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlgraph.cli.options import DEVICES, GRAPH, OVERRIDES, say


@click.command()
@GRAPH
@OVERRIDES
@DEVICES
@click.option("--steps", type=click.IntRange(min=1), help="Stop each run after this many iterations.")
@click.option("--folder", type=click.Path(path_type=Path), help="Directory of the runs  [runs/<graph>-sweep]")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Concurrent runs.")
@click.option("--address", help="Join a Ray cluster with room for several runs: its address, or auto.")
@click.option("--inline", is_flag=True, help="Run each in one process, without Ray.")
@click.option("--track", metavar="NAME", multiple=True, help="As for `rlgraph run`.")
@click.pass_context
def sweep(
    ctx: click.Context,
    graph: str,
    overrides: Sequence[str],
    devices: int | None,
    steps: int | None,
    folder: Path | None,
    jobs: int,
    address: str | None,
    inline: bool,
    track: Sequence[str],
) -> None:
    """Run a graph with each combination of values, such as rollout.n=[4,8] seed=[0,1,2].

    A list is swept if the setting takes no list; if it takes one, give a list of lists. All combinations are
    checked first. Started again with the same folder, the sweep continues; finished runs are not repeated.
    """
    from rlgraph.sweep.combinations import combinations
    from rlgraph.sweep.results import LEGEND
    from rlgraph.sweep.runs import Sweep

    runs = combinations(graph, overrides, devices)
    options = [f"--track={name}" for name in track]
    for option, value in (("--devices", devices), ("--steps", steps), ("--address", address)):
        if value:
            options.append(f"{option}={value}")
    if inline:
        options.append("--inline")
    place = folder or Path("runs") / f"{Path(graph).stem}-sweep"
    say(f"{len(runs)} runs of {graph}, in {place}")
    reached, is_done = Sweep(graph, runs, place, options, say).carry_out(jobs)
    say(f"\n{reached.text()}\n{LEGEND}\n  {place / 'sweep.html'}  the same with curves")
    say(f"  {place / 'table.csv'}  a row per run")
    ctx.exit(0 if is_done else 1)
