"""Settings that are flags of a program (argparse): a command line, or the launch script that has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.importer import KeyOutcome, remark
from rlgraph.importing.shell import Command, LaunchedProgram, commands_of, flags_of, launches_of


@dataclass(frozen=True)
class FlagSettings:
    """The settings that a user gave as flags.

    Attributes:
        program: the one that is launched, of those that were asked for.
        flags: the values by the names of their flags, without the dashes.
        file: the launch script, if there is one.
        launches: how many different launches the script has.
        line: where in the script the launch stands.
    """

    program: str
    flags: dict[str, Any]
    file: Path | None = None
    launches: int = 1
    line: int = 0

    def outcomes(self) -> list[KeyOutcome]:
        """Return what the user has to know of the script itself."""
        if self.launches == 1:
            return []
        text = f"it has {self.launches} launches, and this is the one in line {self.line}"
        return [remark(str(self.file), f"{text}; choose another with --launch 2 and so on")]


def read_flags(words: Sequence[str], programs: Sequence[str], launch: int = 1) -> FlagSettings:
    """Return the settings of a command line: a launch script, flags, or a script and flags that count more.

    Words before the flags may also be the command itself: ``python3 -m openrlhf.cli.train_ppo_ray --...``.

    Args:
        words: what stands behind ``rlgraph import SYSTEM``.
        programs: the trainers, as ``rlgraph.importing.shell.launches_of`` takes them.
        launch: which launch of a script is meant, from 1.

    Raises:
        GraphError: the script can't be read, or launches none of the programs.
    """
    if not words:
        raise GraphError(
            [Problem("no-file", "there are no settings", remedy="give a launch script, or flags")]
        )
    if words[0].startswith("--"):
        return FlagSettings(programs[0], flags_of(words))
    file = Path(words[0])
    if not file.is_file():
        return _command_line(words, programs)
    launches = launches_in(file, programs)
    chosen = chosen_launch(file, launches, launch)
    flags = flags_of(chosen.words) | flags_of(words[1:])
    return FlagSettings(chosen.program, flags, file, len(launches), chosen.line)


def launches_in(file: Path, programs: Sequence[str]) -> list[LaunchedProgram]:
    """Return each launch of one of some programs in a script.

    Raises:
        GraphError: the script can't be read, or has none.
    """
    launches = launches_of(commands_of(file), programs)
    if not launches:
        law = f"{file} launches no known trainer"
        remedy = "give the script that launches one, or the settings themselves"
        raise GraphError([Problem("no-launch", law, None, tuple(programs), remedy)])
    return launches


def chosen_launch(file: Path, launches: Sequence[LaunchedProgram], number: int) -> LaunchedProgram:
    """Return a launch by its number, from 1.

    Raises:
        GraphError: the script has no such launch.
    """
    if not 1 <= number <= len(launches):
        numbered = enumerate(launches, 1)
        places = ", ".join(f"{n} (line {launch.line}: {launch.program})" for n, launch in numbered)
        law = f"{file} has no launch {number}"
        raise GraphError([Problem("no-launch", law, remedy=f"it has {places}")])
    return launches[number - 1]


def _command_line(words: Sequence[str], programs: Sequence[str]) -> FlagSettings:
    launches: list[LaunchedProgram] = launches_of([Command(tuple(words), 1)], programs)
    if not launches:
        law = f"there is no file {words[0]}"
        remedy = "give a launch script, or flags, as --name value"
        raise GraphError([Problem("no-file", law, remedy=remedy)])
    return FlagSettings(launches[0].program, flags_of(launches[0].words))
