"""docs/commands.md: every command and option, as `rlgraph COMMAND --help` has them (``--bless``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import click

from rlgraph.cli.main import main

OPENING = """# Commands

What `rlgraph COMMAND --help` prints, on one page. A test writes it from the commands themselves
(`pytest --bless tests/compiler/test_command_page.py`); do not edit it.

`GRAPH` is a file or the name of a shipped graph ([algorithms](algorithms.md)). `KEY=VALUE` changes a value
in it, as `rollout.n=8`; quote lists, as `'prompts.files=[train.jsonl]'`."""


def page() -> str:
    blocks = [OPENING, contents()]
    for name, command in main.commands.items():
        blocks.append(command_text(name, command))
    return "\n\n".join(blocks) + "\n"


def contents() -> str:
    lines = ["| command | what it does |", "|---|---|"]
    for name, command in main.commands.items():
        first_sentence = paragraphs(command)[0].partition(";")[0].partition(". ")[0].rstrip(".")
        lines.append(f"| [`{name}`](#{name}) | {cell(first_sentence)} |")
    return "\n".join(lines)


def command_text(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"rlgraph {name}", parent=None)
    usage = " ".join([f"rlgraph {name}", *command.collect_usage_pieces(context)])
    blocks = [f"## {name}", f"```text\n{usage}\n```", *paragraphs(command)]
    records = []
    for parameter in command.params:  # --help is not among them
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            records.append(record)
    if records:
        rows = []
        for flags, text in records:
            escaped_flags = flags.replace("|", "\\|")
            rows.append(f"| `{escaped_flags}` | {cell(text)} |")
        blocks.append("\n".join(["| option | |", "|---|---|", *rows]))
    return "\n\n".join(blocks)


def paragraphs(command: click.Command) -> list[str]:
    """The paragraphs of a command's help, each on one line."""
    text = inspect.cleandoc(command.help or "")
    return [" ".join(paragraph.split()).replace("\b ", "") for paragraph in text.split("\n\n")]


def cell(text: str) -> str:
    """A text as a cell of a table: brackets would be taken for links or tags, and bars for borders."""
    escaped = " ".join(text.split())
    for character in "|[<":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def test_the_page_of_commands_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/commands.md", page())


def test_every_command_and_option_is_on_the_page() -> None:
    text = page()
    for name, command in main.commands.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        for option in options:
            assert option.opts[0] in section, f"{name} {option.opts[0]}"
