"""Errors: what can be wrong with a graph or a run, and how it is shown.

RlgraphError        anything that is the user's to mend; the CLI prints it and exits 1
├─ GraphError       the graph is wrong: one or more problems, each at a place in a file
└─ RunError         a run failed: what, in which step, and what to do
   └─ StoppedError  a run was asked to stop, and can go on; the CLI exits 75
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from rlgraph.records import dataclass
from rlgraph.variables import hidden

# what a terminal obeys (escapes, carriage returns, directions of writing), and what can't be encoded
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# names of sources that are no files
COMMAND_LINE = "command line"
EDIT = "an edit in Python"
FEW = 12  # names that an error lists whole; of more it has the nearest
NEAREST = 5
LONGEST = 4000  # characters of somebody else's error that are shown


@dataclass(frozen=True)
class Source:
    """A text that a graph came from: a file, or the command line.

    ``folder`` is where relative paths in the text start. None: at the folder of the file.
    """

    name: str
    text: str
    folder: str | None = None

    @property
    def base(self) -> Path:
        """Return the folder at which relative paths in the text start."""
        if self.folder is None:
            return Path(self.name).parent
        return Path(self.folder)

    def line(self, number: int) -> str:
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Mark:
    """A place in a source; line and column count from 1."""

    source: Source
    line: int
    column: int

    def __str__(self) -> str:
        is_file = self.source.name not in (COMMAND_LINE, EDIT)
        return f"{self.source.name}:{self.line}:{self.column}" if is_file else self.source.name

    def excerpt(self, width: int = 110) -> tuple[str, int]:
        """Return the line, or ``width`` characters of a longer one, and how many stand before the place."""
        line = "".join(c if c.isprintable() else " " for c in self.source.line(self.line))
        start = max(0, min(self.column - 1 - width // 2, len(line) - width))
        return line[start : start + width], self.column - 1 - start


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, which law it breaks, and how to mend it."""

    kind: str
    law: str
    mark: Mark | None = None
    accepted: tuple[str, ...] = ()
    remedy: str = ""
    drawing: str = ""  # the piece of the graph, for a problem between nodes
    grade: Literal["error", "warning"] = "error"  # a graph with warnings runs, and likely not as meant
    nearest_names: str = ""  # what the text has in place of ``accepted`` where that is long (``few_of``)

    def render(self) -> str:
        """Return the problem as text: place and law, the line with a caret, what is accepted, the remedy."""
        law = hidden(self.law)
        if self.grade == "warning":
            law = f"warning: {law}"
        lines = []
        if self.mark is None:
            lines.append(law)
        else:
            lines.append(f"{self.mark}: {law}")
            lines += self._excerpt(self.mark)
        if self.nearest_names:
            lines.append(f"  {self.nearest_names}")
        elif self.accepted:
            lines.append(f"  accepted: {', '.join(self.accepted)}")
        if self.remedy:
            lines.append(f"  {hidden(self.remedy)}")
        lines += [f"    {line}" for line in self.drawing.splitlines()]
        return "\n".join(lines)

    def _excerpt(self, mark: Mark) -> list[str]:
        """Return the line of a place and a caret below it; nothing if the place has no text."""
        line, column = mark.excerpt()
        if not line:
            return []
        number = str(mark.line)
        return [f"  {number} | {line}", f"  {' ' * len(number)} | {' ' * column}^"]


class RlgraphError(Exception):
    """A mistake or a failure that the user can mend; a command exits with its ``exit_code``."""

    exit_code = 1


class GraphError(RlgraphError):
    """The graph is wrong. ``problems`` holds every problem that was found, each once.

    ``valid_tree`` is the graph's tree without the parts that are wrong; None if no further problems can be
    found in it.
    """

    def __init__(self, problems: Iterable[Problem], valid_tree: Any = None):
        self.problems, self.valid_tree = tuple(dict.fromkeys(problems)), valid_tree
        super().__init__("\n\n".join(problem.render() for problem in self.problems))


class RunError(RlgraphError):
    """A run could not start or did not finish. The message repeats no value of a variable."""

    def __init__(self, message: str = "") -> None:
        super().__init__(hidden(message))


class StoppedError(RunError):
    """A run was asked to stop, and did so with a checkpoint. It may be resumed as it is."""

    exit_code = os.EX_TEMPFAIL


def visible(text: str) -> str:
    """Return a text that may be printed: what a terminal would obey in it is spelled out.

    Example:
        >>> print(visible("\x1b[2Jgone?"))
        \\x1b[2Jgone?
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def fitted(text: str, width: int) -> str:
    """Return a text whose lines have at most so many characters, but for longer words.

    A line that is broken goes on below its second column, where two spaces part it from the first, else
    behind where it began, past a mark in its first place. What a shell is to read as one word is not broken,
    nor a line of a file and the mark below it, which a terminal breaks at the same column.

    Example:
        >>> print(fitted("+ move prompt to main[0-7]", 16))
        + move prompt to
             main[0-7]
    """
    import textwrap

    lines = []
    for line in text.split("\n"):
        is_word_or_excerpt = re.match(r"\s*('|\d* \| )", line)
        if len(line) <= width or is_word_or_excerpt:
            lines.append(line)
            continue
        second_column = re.match(r".\s*\S.*?\s{2,}(?=\S)", line)
        behind_mark = len(line) - len(line[1:].lstrip()) + 3
        begin = second_column.end() if second_column else behind_mark
        indent = " " * min(begin, width // 2)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
    return "\n".join(lines)


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a text without hidden values, or of one over ``most`` characters its beginning and its end.

    Example:
        >>> shortened("abcdefgh", 4)
        'ab\\n... (8 characters in all) ...\\ngh'
    """
    text = hidden(text)  # before it is cut: half a key would not be recognised
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... ({len(text):,} characters in all) ...\n{text[-half:]}"


def nearest(name: str, known: Collection[str]) -> str:
    """Return ``did you mean `x`?`` or nothing.

    Example:
        >>> nearest("rewrads", ["rewards", "values"]), nearest("ppo", ["dpo", "ppo_clip"])
        ('did you mean `rewards`?', 'did you mean `ppo_clip`?')
    """
    import difflib  # most graphs have no error

    matches: list[str] = []
    if len(name) > 2:
        matches = [candidate for candidate in known if candidate.startswith(name)]
    if not matches:
        matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean `{matches[0]}`?" if matches else ""


def few_of(name: str, known: Collection[str], command: str) -> str:
    """Return the names most like a wrong one, and the command that lists all; nothing where all are few.

    Example:
        >>> few_of("reward.exakt", ["reward.exact", "rewards", *map(str, range(80))], "rlgraph nodes")
        'nearest: reward.exact, rewards; `rlgraph nodes` lists all'
    """
    if len(known) <= FEW:
        return ""
    import difflib

    matches = difflib.get_close_matches(name, list(known), n=NEAREST, cutoff=0.5)
    all_names = f"`{command}` lists all"  # no count of them: it would change messages with each that is new
    if not matches:
        return all_names
    return f"nearest: {', '.join(matches)}; {all_names}"


def divisors(number: int) -> list[str]:
    """Return what divides a number, for an error to propose.

    Example:
        >>> divisors(6)
        ['1', '2', '3', '6']
    """
    return [str(size) for size in range(1, number + 1) if number % size == 0]


def warning(kind: str, law: str, mark: Mark | None, remedy: str = "") -> Problem:
    """Return a problem that a run may have: the graph likely does not mean it."""
    return Problem(kind, law, mark, (), remedy, grade="warning")


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise the problems, each once, as a ``GraphError``; do nothing where there is none."""
    found = tuple(problems)
    if found:
        raise GraphError(found)


def fail(
    kind: str,
    law: str,
    mark: Mark | None,
    accepted: Iterable[str] = (),
    remedy: str = "",
    nearest_names: str = "",
) -> GraphError:
    """Return a ``GraphError`` of one problem."""
    return GraphError([Problem(kind, law, mark, tuple(accepted), remedy, nearest_names=nearest_names)])
