"""`rlgraph import`: settings of another system become a graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlgraph.cli.options import say
from rlgraph.errors import visible

if TYPE_CHECKING:
    from rlgraph.importing.importer import Imported

TRAINERS = ("grpo", "rloo", "dpo", "sft", "kto", "reward", "distillation", "cpo", "orpo")  # of TRL
OUTPUT_PATH = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the graph to a file."
)


@click.group(name="import")
def import_settings() -> None:
    """Convert another system's settings into a graph, and list what became of each key."""


@import_settings.command()
@click.argument("settings", nargs=-1, metavar="[CONFIG.yaml | SCRIPT.sh] [KEY=VALUE]...")
@click.option(
    "--config-name",
    "-cn",
    help="The name of a configuration of verl, or of a file in --config-path, as in verl.",
)
@click.option("--config-path", "-cp", help="The folder of --config-name, as in verl.")
@click.option(
    "--version",
    type=click.Choice(["0.9.1", "main"]),
    default="0.9.1",
    help="Use the defaults and losses of this release.",
)
@click.option(
    "--launch", type=click.IntRange(1), default=1, help="The launch to take, if a script has several."
)
@OUTPUT_PATH
def verl(
    settings: Sequence[str],
    config_name: str | None,
    config_path: str | None,
    version: str,
    launch: int,
    output: Path | None,
) -> None:
    """Import a configuration of verl's PPO or SFT trainer: a YAML file, KEY=VALUE as in verl, or both.

    A launch script is not run: only the words after the trainer are read.
    """
    from rlgraph.importing.verl import import_verl, script_settings

    if settings and settings[0].endswith(".sh"):
        words, flags = script_settings(Path(settings[0]), launch)
        settings = [*words, *settings[1:]]
        config_name = config_name or flags.get("config-name")
        config_path = config_path or flags.get("config-path")
    file, overrides = _file_and_overrides(settings)
    shipped = None  # a configuration that comes with verl
    if config_name and file is None:
        name = config_name.removesuffix(".yaml")
        file = Path(config_path or "", f"{name}.yaml")
        if not file.is_file():
            file, shipped = None, name
    _write(import_verl(file, overrides, _folder(output), version, shipped), output)


@import_settings.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="SCRIPT|CONFIG.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--trainer", type=click.Choice(TRAINERS), help="Trainer of these settings.")
@OUTPUT_PATH
def trl(source: Path, overrides: Sequence[str], trainer: str | None, output: Path | None) -> None:
    """Import settings of TRL: a YAML file for `trl grpo --config`, or a script, which is not run."""
    from rlgraph.importing.trl import import_trl

    _write(import_trl(source, overrides, _folder(output), trainer), output)


FLAGS = {"ignore_unknown_options": True}  # those of the trainer, which are not ours


@import_settings.command(context_settings=FLAGS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.sh] [--FLAG VALUE]...")
@click.option(
    "--trainer", type=click.Choice(["ppo", "sft", "dpo", "rm"]), help="Trainer of these flags [ppo]."
)
@click.option(
    "--launch", type=click.IntRange(1), default=1, help="The launch to take, if a script has several."
)
@OUTPUT_PATH
def openrlhf(words: Sequence[str], trainer: str | None, launch: int, output: Path | None) -> None:
    """Import settings of OpenRLHF: a launch script, which is not run, or the flags themselves."""
    from rlgraph.importing.openrlhf import import_openrlhf

    _write(import_openrlhf(words, _folder(output), trainer, launch), output)


def _slime_like(name: str) -> None:
    """Add the command of a system that has slime's flags."""

    @import_settings.command(name=name, context_settings=FLAGS)
    @click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.sh] [--FLAG VALUE]...")
    @click.option(
        "--launch", type=click.IntRange(1), default=1, help="The launch to take, if a script has several."
    )
    @OUTPUT_PATH
    def command(words: Sequence[str], launch: int, output: Path | None) -> None:
        from rlgraph.importing.slime import import_slime

        _write(import_slime(words, _folder(output), launch, name), output)

    command.help = f"Import settings of {name}: a launch script, which is not run, or the flags themselves."


_slime_like("slime")
_slime_like("miles")


@import_settings.command(name="prime-rl", context_settings=FLAGS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[@ CONFIG.toml]... [--KEY VALUE]...")
@click.option(
    "--run",
    type=click.Choice(["rl", "sft"]),
    help="Trainer of these settings. Default: the one in the files.",
)
@OUTPUT_PATH
def prime_rl(words: Sequence[str], run: str | None, output: Path | None) -> None:
    """Import settings of prime-rl: rl.toml or sft.toml, files of its parts, and flags in its own form."""
    from rlgraph.importing.prime_rl import import_prime_rl

    _write(import_prime_rl(words, _folder(output), run), output)


@import_settings.command(name="nemo-rl")
@click.argument("settings", nargs=-1, metavar="CONFIG.yaml [KEY=VALUE]...")
@OUTPUT_PATH
def nemo_rl(settings: Sequence[str], output: Path | None) -> None:
    """Import a configuration of NeMo-RL, including the files in its `defaults`, and KEY=VALUE as in
    NeMo-RL."""
    from rlgraph.importing.nemo_rl import import_nemo_rl

    file, overrides = _file_and_overrides(settings)
    _write(import_nemo_rl(file, overrides, _folder(output)), output)


@import_settings.command()
@click.argument("settings", nargs=-1, metavar="CONFIG.yaml [KEY=VALUE]...")
@OUTPUT_PATH
def areal(settings: Sequence[str], output: Path | None) -> None:
    """Import a configuration of AReaL: a YAML file, KEY=VALUE as in AReaL, or both."""
    from rlgraph.importing.areal import import_areal

    file, overrides = _file_and_overrides(settings)
    _write(import_areal(file, overrides, _folder(output)), output)


def _folder(output: Path | None) -> Path:
    return output.parent if output else Path()


def _file_and_overrides(settings: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file that comes first, if there is one, and the KEY=VALUE behind it."""
    file = None
    overrides = [*settings]
    if overrides and not _is_override(overrides[0]):
        file = Path(overrides.pop(0))
    for override in overrides:
        if not _is_override(override):
            raise click.UsageError(f"`{override}` is not KEY=VALUE, and the file comes first")
    return file, overrides


def _is_override(text: str) -> bool:
    return "=" in text or text.startswith("~")


def _write(imported: Imported, output: Path | None) -> None:
    """Write the graph to a file or to standard output, and the list beside it."""
    graph = imported.graph()
    if output:
        output.write_text(graph, encoding="utf-8")
    else:
        click.echo(visible(graph), nl=False)
    say(imported.report(), err=not output)
    if output:
        say(f"\nwrote {output}; next: rlgraph check {output}")
