"""A plan as text that can be read aloud."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rlgraph.errors import visible
from rlgraph.ir.plan import Plan, Step
from rlgraph.printing.document import DocumentLine, LineKind, PlanDocument

WIDTH = 101  # columns in which lists are broken
INDENT = 17  # columns before the text of a detail, and before the further lines of a list


def plan_text(plan: Plan, failed: tuple[str, int] | None = None, width: int = WIDTH) -> str:
    """Return the whole plan as text, lists broken to ``width``; ``failed`` is the (phase, step) to mark."""
    lines: list[str] = []
    for line in PlanDocument(plan).lines:
        lines += line_text(line, width, failed)
    return visible("\n".join(lines) + "\n")


def line_text(line: DocumentLine, width: int, failed: tuple[str, int] | None = None) -> Iterator[str]:
    """Yield a line of a plan's document as lines of text; only lists are broken to ``width``."""
    if line.kind == LineKind.STEP:
        assert line.entry
        step = line.entry.step
        yield f"{_mark(step, failed)} {step.id:>3}. {line.text}"
    elif line.kind == LineKind.DETAIL:
        yield from _broken(f"         {line.label:<8}", line.text, width)
    elif line.label:
        yield from _broken(f"  {line.label:<14} ", line.text, width)
    else:
        yield line.text


def _mark(step: Step, failed: tuple[str, int] | None) -> str:
    if failed == (step.phase, step.id):
        return "!"
    return "+" if step.inserted else " "


def _broken(label: str, text: str, width: int) -> Iterator[str]:
    """Yield lines broken between the items of a list, not inside ``tokens: int64[samples, tokens]``."""
    # a space that must not be broken becomes one that textwrap does not break
    bound = re.sub(r": |(?<=\w), (?=\w+\])", lambda match: match[0].replace(" ", "\xa0"), text)
    first, *more = textwrap.wrap(bound, width - len(label), break_on_hyphens=False, break_long_words=False)
    yield (label + first).replace("\xa0", " ")
    for line in more:
        yield " " * INDENT + line.replace("\xa0", " ")
