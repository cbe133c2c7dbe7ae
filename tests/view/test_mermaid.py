"""Mermaid's own parser reads what is exported, in a browser: that is where GitHub draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.view.drawings.drawing_options import SHOWN, DrawingOptions
from rlgraph.view.drawings.mermaid import mermaid
from share import families

EVERYTHING = DrawingOptions(types=True, inserted=True)
HOSTILE = 'a "quoted" \\ <b>&amp;</b> ]) --> x; %% `c` #35; end'
SCRIPT = Path(__file__).parents[2] / ".venv" / "mermaid.min.js"
DRAW = """
const [text, done] = [arguments[0], arguments[1]];
mermaid.initialize({startOnLoad: false, securityLevel: "strict"});
mermaid.render("drawn", text).then(({svg}) => {
  document.body.innerHTML = svg;
  const labels = [...document.querySelectorAll(".nodeLabel")].map((label) => label.innerText);
  done({labels, edges: document.querySelectorAll("path.flowchart-link").length});
}, (error) => done({error: String(error)}));
"""


@pytest.fixture
def drawing(browser: Any, tmp_path: Path) -> Any:
    """A page with mermaid in it."""
    if not SCRIPT.is_file():
        pytest.skip(f"mermaid is not here ({SCRIPT}): make browser (npm pack mermaid)")
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><script src="{SCRIPT.as_uri()}"></script><body>')
    browser.open(page)
    return browser


def draw(browser: Any, text: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.driver.execute_async_script(DRAW, text)
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("options", [SHOWN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", families())
def test_mermaid_draws_every_graph(drawing: Any, name: str, options: DrawingOptions) -> None:
    plan = compile_graph(name, devices=2)
    text = mermaid(plan, options)
    found = draw(drawing, text)
    assert found["edges"] == text.count("-->") + text.count("-.->") + text.count("==>")
    for step in plan.steps:
        assert step.inserted or any(label.startswith(step.node) for label in found["labels"])


def test_mermaid_draws_a_region_within_its_pool(drawing: Any) -> None:
    text = mermaid(compile_graph("dapo", ["informative.refill=true"], devices=2))
    found = draw(drawing, text)
    assert found["edges"] == text.count("-->") + text.count("-.->") + text.count("==>")
    assert drawing.count("g.cluster") == 2
    drawing.shot("mermaid-region")


def test_mermaid_shows_hostile_text_as_it_is(drawing: Any) -> None:
    plan = compile_graph("grpo", devices=2)
    first, *rest = plan.steps
    plan = replace(
        plan, steps=(replace(first, node=HOSTILE, action=replace(first.action, op=f"{HOSTILE}!")), *rest)
    )
    found = draw(drawing, mermaid(plan, EVERYTHING))
    drawing.shot("mermaid-hostile")
    assert any(label.split("\n") == [HOSTILE, f"{HOSTILE}!"] for label in found["labels"]), found["labels"]
