"""docs/grading.md: what counts as equal, by real runs of our grader and of others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grading_rows import ROWS
from rlgraph.nodes.reward.equality import compare

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/grading.md"
RECORDED = ROOT / "tests/peers/recorded/graders.json"
MARK = "<!-- what follows is written by pytest --bless tests/nodes/test_grading_page.py -->\n"
NAMES = {
    "math_verify": "Math-Verify",
    "verl math_verify": "verl math_verify",
    "verl math_dapo": "verl math_dapo",
    "verl gsm8k": "verl gsm8k",
    "verl prime_math": "verl prime_math",
    "trl accuracy_reward": "TRL accuracy_reward",
}

OURS = {"right": "equal", "wrong": "different"}
LEGEND = (
    "`unparsed`: no answer, or one that can't be read. `unevaluated`: the answer still has to be computed. "
    "`-`: Math-Verify\ndoes not find it equal."
)


def others() -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    return {(row["response"], row["reference"]): row for row in rows}


def cell(text: str) -> str:
    """Return a text as code in a cell of a table, with signs that can't be seen written out."""
    visible = "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in text)
    visible = visible.replace("\\u000a", " ⏎ ").replace("|", "\\|")
    return f"`` {visible} ``" if "`" in visible else f"`{visible or ' '}`"


def shown(verdict: object) -> str:
    return {True: "equal", False: "-"}.get(verdict, str(verdict))  # type: ignore[call-overload]


def page(verdicts: dict[tuple[str, str], str]) -> str:
    known = others()
    lines = ["\n## Right verdicts per kind\n"]
    lines.append("How many rows of each kind a grader gets right.\n")
    lines.append(f"| kind | rows | `reward.math` | {' | '.join(NAMES.values())} |")
    lines.append("|---|---|---|" + "---|" * len(NAMES))
    for kind, rows in ROWS.items():
        ours = sum((verdicts[row[:2]] == "right") == row[2] for row in rows)
        theirs = [sum((known[row[:2]][name] is True) == row[2] for row in rows) for name in NAMES]
        lines.append(f"| {kind} | {len(rows)} | {ours} | {' | '.join(map(str, theirs))} |")
    lines.append(f"\n## Row by row\n\n{LEGEND}\n")
    for kind, rows in ROWS.items():
        lines.append(
            f"### {kind}\n\n| response | reference | `reward.math` | Math-Verify |\n|---|---|---|---|"
        )
        for row in rows:
            defaults = shown(known[row[:2]]["math_verify"])
            ours_shown = OURS.get(verdicts[row[:2]], verdicts[row[:2]])
            lines.append(f"| {cell(row[0])} | {cell(row[1])} | {ours_shown} | {defaults} |")
        lines.append("")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], str]:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return {row[:2]: compare(*row[:2], unevaluated=False) for rows in ROWS.values() for row in rows}


@pytest.mark.parametrize("kind", ROWS)
def test_answers_are_paid_where_they_are_right_and_finished(
    kind: str, verdicts: dict[tuple[str, str], str]
) -> None:
    wrong = [row for row in ROWS[kind] if (verdicts[row[:2]] == "right") != row[2]]
    assert wrong == []


def test_the_page_shows_what_graders_say(
    verdicts: dict[tuple[str, str], str], request: pytest.FixtureRequest
) -> None:
    written = PAGE.read_text(encoding="utf-8")
    intro, mark, _ = written.partition(MARK)
    assert mark
    text = intro + mark + page(verdicts)
    if request.config.getoption("--bless"):
        PAGE.write_text(text, encoding="utf-8")
        return
    assert written == text, "pytest --bless tests/nodes/test_grading_page.py"


@pytest.mark.parametrize("response", ["\\boxed{(12)(13)}", "\\boxed{12\\times13}", "\\boxed{7+149}"])
def test_unfinished_work_is_paid_where_it_is_asked_for(response: str) -> None:
    assert compare(response, "156", unevaluated=True) == "right"
    assert compare(response, "156", unevaluated=False) == "unevaluated"


# pieces that made an expression search to the end of the text from each of its places
@pytest.mark.parametrize(
    "piece", ["(", "\\[", "\\(", "\\frac{1}{2}", "\n", "final answer is ", "\\quad", "<answer>", "1 "]
)
@pytest.mark.parametrize("frame", ["{}", "\\boxed{{{}}}", "<answer>{}</answer>"])
def test_long_responses_are_read_in_time(
    piece: str, frame: str, process_seconds: Callable[[], float]
) -> None:
    from rlgraph.nodes.reward.answer_text import answer_in

    text = frame.format(piece * (100_000 // len(piece)))
    start = process_seconds()
    answer_in(text)
    assert process_seconds() - start < 3.0


@pytest.fixture
def process_seconds() -> Callable[[], float]:
    import time

    return time.process_time


def test_words_behind_a_number_are_read_in_time(process_seconds: Callable[[], float]) -> None:
    from rlgraph.nodes.reward.answer_text import normal

    start = process_seconds()
    normal("5 " + "a" * 60 + "1")
    assert process_seconds() - start < 1.0
