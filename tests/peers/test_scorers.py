"""verl's and TRL's own scorers give in a graph what they give where they come from (at night, in .peers).

What they give there is recorded by ``ask_scorers.py``; by day the docs are held to it.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scorer_cases import SANDBOX, TRL, VERL, Scorer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PYTHON = ROOT / ".peers/bin/python"
RECORDED = json.loads((FOLDER / "recorded/scorers.json").read_text("utf-8"))
SCORERS = {"verl": VERL, "trl": TRL}
NAMES = [f"{peer} {scorer.name}" for peer, scorers in SCORERS.items() for scorer in scorers]
OP = {"verl": "reward.verl", "trl": "reward.trl"}
NO_TOKEN = "no token"  # of an empty response, to which verl's batch manager can't write a reward
# those that start processes, choose among several, or are called with a batch
ON_RAY = ("verl math_verify", "verl math_batch", "verl default_compute_score", "trl accuracy_reward")


def differing(name: str, scores: list[Any]) -> list[str]:
    """Return where a node's scores are not the peer's; a sample fails where the peer raises or gives None."""
    problems = []
    for row, (wanted, given) in enumerate(zip(RECORDED["scores"][name], scores, strict=True)):
        if wanted == NO_TOKEN:
            continue
        same = given == "failed"
        if isinstance(wanted, float):
            same = isinstance(given, float) and math.isclose(wanted, given, rel_tol=1e-6)
        if not same:
            problems.append(f"{name}, row {row}: {wanted} there, {given} here")
    return problems


def scored(where: str, folder: Path, names: tuple[str, ...] = ()) -> dict[str, list[list[Any]]]:
    """Return what the nodes of a graph give, of a run with the peers' environment."""
    package = folder / "site/rlgraph"
    package.mkdir(parents=True)
    for part in (ROOT / "rlgraph").iterdir():
        (package / part.name).symlink_to(part)
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [str(PYTHON), str(FOLDER / "score_by_graph.py"), where, "scores.json", *names]
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, timeout=1500, **options)
    assert done.returncode == 0, done.stderr[-5000:]
    given: dict[str, list[list[Any]]] = json.loads((folder / "scores.json").read_text("utf-8"))
    return given


@pytest.mark.nightly
@pytest.mark.timeout(1600)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs .peers: make peers")
@pytest.mark.parametrize(("where", "names"), [("inline", ()), ("ray", ON_RAY)], ids=["inline", "ray"])
def test_scorers_give_in_a_graph_what_they_give_in_verl_and_trl(
    where: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    given = scored(where, tmp_path, names)
    assert sorted(given) == sorted(names or NAMES)
    assert [
        line for name, nodes in given.items() for scores in nodes for line in differing(name, scores)
    ] == []


@pytest.mark.parametrize("peer", SCORERS)
def test_every_scorer_that_is_shipped_is_asked_about(peer: str) -> None:
    known = {node["function"] for scorer in SCORERS[peer] for node in scorer.nodes}
    assert known == set(RECORDED["shipped"][peer])
    for scorer in SCORERS[peer]:
        scores = RECORDED["scores"][f"{peer} {scorer.name}"]
        assert len(scores) == len(scorer.rows) >= 20
        assert len({*map(str, scores)}) > 1, "rows that all have one score compare nothing"


def first_column(scorer: Scorer) -> str:
    more = "".join(f", `{name}`" for name in scorer.needs)
    return scorer.name + (f" (needs {more[2:]})" if more else "")


def as_yaml(attributes: dict[str, Any]) -> str:
    """Return attributes as a graph has them."""
    text = json.dumps(attributes).replace(SANDBOX, "http://sandbox:8080/run_code")
    return re.sub(r'"(\w+)": ', r"\1: ", text[1:-1])


def table(peer: str) -> str:
    """Return the table of a page: how a scorer is named, and on how many rows its scores are equal."""
    has_none = {
        "verl": "of which raise there, and fail here",
        "trl": "of which are None there, and fail here",
    }
    lines = [f"| scorer | `{OP[peer]}` with | rows | {has_none[peer]} |", "|---|---|---|---|"]
    for scorer in SCORERS[peer]:
        scores = [score for score in RECORDED["scores"][f"{peer} {scorer.name}"] if score != NO_TOKEN]
        raised = sum(not isinstance(score, float) for score in scores)
        ways = " or ".join(f"`{as_yaml(node)}`" for node in scorer.nodes)
        lines.append(f"| {first_column(scorer)} | {ways} | {len(scores)} | {raised} |")
    return "\n".join(lines)


@pytest.mark.parametrize("peer", SCORERS)
def test_the_page_lists_the_scorers(peer: str, request: pytest.FixtureRequest) -> None:
    page = ROOT / f"docs/from_{peer}.md"
    head, mark, rest = page.read_text("utf-8").partition("<!-- scorers: pytest --bless tests/peers -->\n")
    _, end, tail = rest.partition("<!-- end of scorers -->\n")
    text = f"{head}{mark}\n{table(peer)}\n\n{end}{tail}"
    if request.config.getoption("--bless"):
        page.write_text(text, "utf-8")
    assert mark
    assert end
    assert page.read_text("utf-8") == text
