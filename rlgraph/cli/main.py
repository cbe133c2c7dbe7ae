"""The command line. Only command bodies reach outward, so that checking needs neither torch nor ray."""

from typing import Any

import click

from rlgraph.cli.demo import chat, demo
from rlgraph.cli.imports import import_settings
from rlgraph.cli.options import say
from rlgraph.cli.plan import check, diff, plan, show
from rlgraph.cli.reference import graphs, nodes
from rlgraph.cli.run import doctor, evaluate, export, replay, resume, run
from rlgraph.cli.sweep import sweep
from rlgraph.cli.view import report, view
from rlgraph.files import failure
from rlgraph.version import VERSION

# in the order in which --help lists them
LISTS = (nodes, graphs, import_settings)
COMMANDS = (
    run,
    resume,
    sweep,
    evaluate,
    check,
    plan,
    show,
    diff,
    view,
    report,
    export,
    chat,
    replay,
    doctor,
    demo,
    *LISTS,
)


class Commands(click.Group):
    """Lists commands in the order of use; prints a user's mistake or an unusable file without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            described = failure(error)
            if described is None:
                raise
            text, exit_code = described
            say(text, err=True)
            ctx.exit(exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="rlgraph")
def main() -> None:
    """Compile and run reinforcement-learning post-training, written as a graph.

    GRAPH is a path, or the name of a shipped graph (see `rlgraph graphs`). KEY=VALUE changes a value in it,
    such as rollout.n=8 or models.policy.path=DIR.
    """


for command in COMMANDS:
    main.add_command(command)
