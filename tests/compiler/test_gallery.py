"""What users of other frameworks reported, each a graph: what rlgraph says of it before anything starts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlgraph.compiler import Compilation, compile_graph
from rlgraph.errors import GraphError
from rlgraph.request import PlanRequest
from rlgraph.syntax.shipped_files import graphs_folder

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gallery.yaml").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
WIDTH = 240  # of lists of all that is accepted, the beginning
TITLE = """\
# Their issue, our error

{count} mistakes that users and reviewers of other frameworks have reported or asked about. Each is written
here as the graph that has it, with what `rlgraph check` says and the time that it takes: on two cores that
others used too, with no GPU, and before a model is read. Where it says `--strict`, the graph is legal, and
`check` warns of it. What is compared is the mistake, not the program, and many of them are mended there by
now.

Made by `pytest --bless tests/compiler/test_gallery.py` from `tests/compiler/gallery.yaml`. The test asserts
every message; milliseconds are those of the last time that this page was made.
"""


def graph_of(case: dict[str, Any]) -> str:
    """The case's graph, as a user would write it."""
    parts = {"graph": "mine", "extends": case["extends"]}
    edits = "\n".join(f"  - {line}" for line in map(_flow, case["edits"]))
    return yaml.safe_dump(parts, sort_keys=False) + f"edits:\n{edits}\n"


def _flow(edit: dict[str, Any]) -> str:
    [(verb, what)] = edit.items()
    return f"{verb}: {yaml.safe_dump(what, default_flow_style=True, width=1000, sort_keys=False).strip()}"


def said(case: dict[str, Any], folder: Path) -> tuple[str, float]:
    """What the user reads, without paths of this machine; and after how many milliseconds."""
    path = folder / "mine.yaml"
    path.write_text(graph_of(case))
    devices, began = case.get("devices", 8), time.perf_counter()
    compilation = Compilation(PlanRequest(str(path), devices=devices))
    if case.get("strict"):
        assert compilation.plan
    with pytest.raises(GraphError) as caught:
        assert compilation.plan.steps and compilation.warn(strict=True)
    took = (time.perf_counter() - began) * 1000
    text = str(caught.value).replace(f"{graphs_folder()}/", "graphs/").replace(f"{folder}/", "")
    return "\n".join(
        line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in text.splitlines()
    ), took


def section(case: dict[str, Any], folder: Path) -> str:
    message, took = said(case, folder)
    name = re.sub(r"https://github.com/(.+)/(?:issues|pull)/(\d+)", r"\1#\2", case["issue"])
    graph = f"```yaml\n{graph_of(case)}```"
    options = f"--devices {case.get('devices', 8)}{' --strict' * case.get('strict', False)}"
    link, screen = f"[{case['said']}]({case['issue']})", f"```text\n{message}\n```"
    return "\n\n".join(
        [f"## {name}", link, graph, f"`rlgraph check mine.yaml {options}`:", screen, f"{took:.0f} ms\n"]
    )


def test_the_gallery_is_what_rlgraph_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = "\n".join([TITLE.format(count=len(CASES)), *(section(case, tmp_path) for case in CASES)])
    if request.config.getoption("--bless"):
        PAGE.write_text(page, encoding="utf-8")
    assert _without_times(PAGE.read_text(encoding="utf-8")) == _without_times(page)


def test_there_are_enough_and_none_twice() -> None:
    assert len({case["issue"] for case in CASES}) == len(CASES) >= 20


@pytest.mark.parametrize("name", sorted({case["extends"] for case in CASES}))
def test_without_the_bug_the_graph_is_fine(name: str) -> None:
    assert compile_graph(name, devices=8).steps


def _without_times(page: str) -> str:
    return re.sub(r"^\d+ ms$", "ms", page, flags=re.MULTILINE)
