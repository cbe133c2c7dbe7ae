"""The page of algorithms is current, and every shipped graph says what it is and where it is from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.reference.describe import entry_of
from rlgraph.reference.pages import algorithms
from rlgraph.syntax.yaml_text import flow

NO_PAPER = ("demo", "demo_sft", "demo_smollm", "calculator_sft")


def test_the_page_of_algorithms_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/algorithms.md", algorithms())


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    result = CliRunner().invoke(main, ["graphs", "--format", "markdown", "-o", str(path)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert path.read_text(encoding="utf-8") == algorithms()


@pytest.mark.parametrize("name", shipped_graphs())
def test_a_shipped_graph_opens_with_its_drawing_and_has_a_source(name: str) -> None:
    text = shipped_graphs()[name].read_text(encoding="utf-8")
    assert text.startswith("#  ") and "─>" in text.partition("\n")[0]
    about = str(compose(name).items["about"].value)
    assert name in NO_PAPER or re.search(r"arXiv \d{4}\.\d{5}", about)


@pytest.fixture(scope="module")
def page() -> str:
    return algorithms()


@pytest.mark.parametrize("name", shipped_graphs())
def test_each_has_a_section_below_its_parents(name: str, page: str) -> None:
    assert page.count(f"\n## {name}\n") == 1
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    if parent := re.search(r"An edit of \[(\w+)\]", section):
        assert page.index(f"\n## {parent[1]}\n") < page.index(f"\n## {name}\n")


def value_at(name: str, path: str) -> str:
    """Return the value at a path of a composed graph, or the default of the op or loss, as YAML writes it."""
    graph = compose(name).plain()
    section = graph["nodes"] | graph
    *parents, key = path.split(".")
    for parent in parents:
        section = section[parent]
    if key in section:
        return flow(section[key])
    declared_by = section["op"] if "op" in section else section["kind"]
    defaults = {name: default for name, _, default, _ in entry_of(declared_by).attributes}
    return defaults[key]


@pytest.mark.parametrize("name", shipped_graphs())
def test_what_a_graph_compares_with_its_paper_is_what_it_does(name: str) -> None:
    """A line such as ``# - rollout.n: 8, not 64`` begins with the value of the graph."""
    text = shipped_graphs()[name].read_text(encoding="utf-8")
    for path, stated in re.findall(r"^# - ([a-z_]+(?:\.[a-z_0-9]+)+): (.*)", text, re.MULTILINE):
        assert re.match(rf"{re.escape(value_at(name, path))}(?![\w.])", stated), path


def test_a_new_algorithm_is_a_few_lines() -> None:
    for name, path in shipped_graphs().items():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert "extends:" not in "".join(lines) or name.startswith("demo") or len(lines) <= 20
