"""Commands that list what comes with rlgraph."""

import json
from typing import TextIO

import click

from rlgraph.cli.options import OUTPUT, echo, form_option, say


@click.command()
@click.argument("name", required=False)
@form_option(
    "text", "markdown", "jsonschema", help="jsonschema: the schema of the whole graph language, for editors."
)
@OUTPUT
def nodes(name: str | None, form: str, output: TextIO) -> None:
    """List the ops and losses, or show one's declaration and docs; NAME may be my_ops.py:name."""
    from rlgraph.reference.describe import catalog_text, describe, entry_of
    from rlgraph.reference.json_schema import graph_schema
    from rlgraph.reference.pages import entry_markdown, reference

    if name and form == "jsonschema":
        raise click.UsageError("the JSON schema is for the whole language: leave out NAME")
    if form == "jsonschema":
        text = json.dumps(graph_schema(), indent=1) + "\n"
    elif form == "markdown":
        text = entry_markdown(entry_of(name)) + "\n" if name else reference()
    else:
        text = describe(name) if name else catalog_text()
    echo(form, text, file=output, nl=False)


@click.command()
@form_option("text", "markdown")
@OUTPUT
def graphs(form: str, output: TextIO) -> None:
    """List the shipped graphs, or write the page that shows each as an edit of another."""
    from rlgraph.frontend.compose import compose
    from rlgraph.frontend.shipped import shipped_graphs
    from rlgraph.reference.pages import algorithms

    if form == "markdown":
        click.echo(algorithms(), file=output, nl=False)
        return
    width = max(len(name) for name in shipped_graphs())
    for name in shipped_graphs():
        about = compose(name).get("about")
        say(f"{name:<{width}}  {about.value if about else ''}", file=output)
