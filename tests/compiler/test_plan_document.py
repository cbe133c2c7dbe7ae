"""The document of a plan, which texts, terminals, pages, traces and pictures render."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target
from rlgraph.printing.document import LineKind, PlanDocument
from rlgraph.printing.plan_text import line_text, plan_text
from rlgraph.view.contents import contents
from rlgraph.view.subject import Subject
from rlgraph.view.terminal import terminal_text


@pytest.mark.parametrize("name", ["grpo", "demo", "dapo"])
def test_the_text_is_the_lines_of_the_document(name: str) -> None:
    plan = compile_graph(name, devices=2)
    lines = [text for line in PlanDocument(plan).lines for text in line_text(line, 101)]
    assert "".join(f"{line}\n" for line in lines) == plan_text(plan)


def test_a_line_says_of_what_kind_it_is_and_which_step_it_is_about() -> None:
    plan = compile_graph("demo", devices=2)
    lines = PlanDocument(plan).lines
    steps = [line.entry.step for line in lines if line.kind == LineKind.STEP and line.entry]
    assert steps == [*plan.eval_steps, *plan.steps]
    for line in lines:
        assert (line.entry is not None) == (line.kind in (LineKind.STEP, LineKind.DETAIL))
    reasons = {line.entry.step.node for line in lines if line.label == "because" and line.entry}
    assert reasons == {step.node for step in (*plan.eval_steps, *plan.steps) if step.inserted}


def test_a_page_shows_what_the_text_says_of_a_step() -> None:
    plan = compile_graph("grpo", target=Target("h100-8"))
    document = PlanDocument(plan)
    shown = contents(Subject(plan))
    for step, entry in zip(shown["phases"]["train"]["steps"], document.steps["train"], strict=True):
        assert (step["title"], step["does"], step["takes"]) == (entry.title, entry.sentence, entry.cost)
    assert shown["predicted"] == [line.text for line in document.lines if line.kind == LineKind.PREDICTION]


def test_text_of_a_user_that_looks_like_a_step_is_not_coloured_as_one(tmp_path: Path) -> None:
    """Colours follow from the document and not from the printed text."""
    path = tmp_path / "odd.yaml"
    path.write_text(
        'graph: odd\nabout: "see\\n    1. run prompts (data.prompts) on main[0]"\nextends: grpo\n'
    )
    plan = compile_graph(str(path), devices=2)
    shown = terminal_text(plan)
    title, step_like, pool = shown.splitlines()[:3]
    assert title == click.style("plan of odd: see", bold=True)
    assert step_like == click.style("    1. run prompts (data.prompts) on main[0]", bold=True)
    assert pool == click.style("  pool main: 2 devices", bold=False)


def test_a_copy_of_weights_has_no_gradients_to_step_on_the_host() -> None:
    plan = compile_graph("sdft", target=Target("h100-8"))
    (refresh,) = (entry for entry in PlanDocument(plan).steps["train"] if entry.step.copied)
    assert refresh.step.updated and "gradients" not in refresh.cost
    assert "run refresh" in plan_text(plan)
