"""A plan as mermaid and dot: every step and edge is there, and no text of a graph can break out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Literal

import networkx as nx
import pytest
from click.testing import CliRunner

import rlgraph
from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.plan import Plan
from rlgraph.printing.step_text import title
from rlgraph.view.drawings.boxes import StepGroup, box, drawing, links, weights
from rlgraph.view.drawings.dot import dot, picture
from rlgraph.view.drawings.drawing_options import DrawingOptions
from rlgraph.view.drawings.mermaid import mermaid
from rlgraph.view.trace import trace

EVERYTHING = DrawingOptions(types=True, inserted=True)
HOSTILE = 'a "quoted" \\ <b>&amp;</b> ]) --> x; %% `c` \n #35; end'
needs_graphviz = pytest.mark.skipif(
    not shutil.which("dot"), reason="graphviz is not here: apt-get install graphviz"
)


def hostile(plan: Plan) -> Plan:
    """The plan with pools, nodes and columns of names that no graph may have."""
    (pool, count), *_ = plan.pools.items()
    first, *rest = plan.steps
    written = first.writes[0]
    action = replace(first.action, op=HOSTILE)
    step = replace(first, node=HOSTILE, because=HOSTILE, pool=HOSTILE, action=action)
    columns = {**plan.columns, "train": dict(plan.columns["train"])}
    for name, column in columns["train"].items():
        kind = HOSTILE if name == written else column.type
        writer = HOSTILE if column.writer == first.node else column.writer
        columns["train"][name] = replace(column, type=kind, writer=writer)
    others = tuple(replace(other, pool=HOSTILE if other.pool == pool else other.pool) for other in rest)
    return replace(plan, graph=HOSTILE, pools={HOSTILE: count}, steps=(step, *others), columns=columns)


@needs_graphviz
@pytest.mark.parametrize("name", [*shipped_graphs(), "hostile"])
def test_graphviz_reads_every_graph(name: str) -> None:
    plan = hostile(compile_graph("grpo", devices=2)) if name == "hostile" else compile_graph(name, devices=2)
    done = subprocess.run(
        ["dot", "-Tjson0"], input=dot(plan, EVERYTHING), capture_output=True, text=True, check=True
    )
    assert not done.stderr
    drawn = json.loads(done.stdout)
    both = (plan.steps, plan.eval_steps)
    expected = sum(len(steps) + len(weights(steps)) for steps in both)
    nodes = [item for item in drawn["objects"] if "nodes" not in item]
    assert len(nodes) == expected
    flows = sum(len(w.readers) + bool(w.writer) for steps in both for w in weights(steps))
    assert len(drawn["edges"]) == sum(len(links(plan, phase)) for phase in plan.phases) + flows


def test_regions_are_drawn_within_their_pool() -> None:
    plan = compile_graph("dapo", ["informative.refill=true"], devices=2)
    (pool,) = [part for part in drawing(plan, EVERYTHING) if isinstance(part, StepGroup)]
    (region,) = pool.regions
    assert {entry.step.node for entry in region.steps} >= {"prompts", "rollout", "rewards", "informative"}
    assert "update_policy" in {entry.step.node for entry in pool.steps}
    for text in (dot(plan, EVERYTHING), mermaid(plan)):
        assert text.count("subgraph ") == 2 and text.count(region.title) == 1
        assert all(
            f"{name}[" in text or f"{name} [" in text
            for step in (entry.step for entry in region.steps)
            for name in [box(step.phase, step.id)]
            if not step.inserted
        )


@needs_graphviz
def test_graphviz_shows_hostile_text_as_it_is() -> None:
    plan = hostile(compile_graph("grpo", devices=2))
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=dot(plan, EVERYTHING), capture_output=True, text=True, check=True
    )
    assert "<b>" not in drawn.stdout
    assert "&lt;b&gt;" in drawn.stdout


@pytest.mark.parametrize("name", ["grpo", "ppo", "demo"])
def test_mermaid_has_every_step_and_link(name: str) -> None:
    plan = compile_graph(name, devices=2)
    text = mermaid(plan, EVERYTHING)
    for step in plan.steps:
        assert re.search(rf"^ +train_{step.id}[\[(]", text, re.M), title(step)
    for link in links(plan, "train"):
        assert re.search(rf"^ +train_{link.source} (-->|-\.->).* ?train_{link.target}$", text, re.M), link
    assert text.count("subgraph ") == text.count("\n  end\n")


def test_mermaid_labels_hold_no_character_that_means_something() -> None:
    text = mermaid(hostile(compile_graph("grpo", devices=2)), EVERYTHING)
    for label in re.findall(r'"(.*)"', text):
        assert not set(label.replace("<br/>", "")) & set('"<>&`\\\n')
    assert HOSTILE.splitlines()[0] not in text


def test_columns_have_types_and_models_versions() -> None:
    text = mermaid(compile_graph("grpo", devices=1), EVERYTHING)
    assert '-->|"rewards: float32[samples]"|' in text
    assert [w.name for w in weights(compile_graph("ppo", devices=1).steps)] == [
        "policy@v",
        "policy@v+1",
        "ref@v",
        "critic@v",
        "critic@v+1",
    ]


def test_an_order_that_follows_from_columns_is_no_link() -> None:
    plan = compile_graph("grpo", devices=2)
    names = {step.id: step.node for step in plan.steps}
    found = [(names[link.source], names[link.target]) for link in links(plan, "train") if not link.columns]
    assert found == [("sync:policy", "rollout")]


@pytest.mark.parametrize("name", shipped_graphs())
def test_pictures_show_what_the_user_wrote_unless_asked_for_more(name: str) -> None:
    plan = compile_graph(name, devices=2)
    for phase, steps in plan.phases.items():
        written = {step.id for step in steps if not step.inserted}
        found = links(plan, phase, inserted=False)
        assert all({link.source, link.target} <= written for link in found)
        text = mermaid(plan)
        assert all((f" {box(phase, step.id)}[" in text) != step.inserted for step in steps)
        # what depends on what is as it was
        reaches = nx.DiGraph([(link.source, link.target) for link in found])
        for target in written:
            needed = plan.needs[phase].reachable([target]) & written - {target}
            assert needed == (nx.ancestors(reaches, target) if target in reaches else set()), target


def test_types_inserted_steps_and_the_direction_are_options() -> None:
    def written(*options: str) -> str:
        result = CliRunner().invoke(main, ["plan", "grpo", "--devices", "2", "--format", "dot", *options])
        assert result.exit_code == 0
        return result.stdout

    plain = written()
    assert "rankdir=TB" in plain and "int64" not in plain and "repartition prompt" not in plain
    assert "rankdir=LR" in written("--direction", "right")
    assert "float32[samples]" in written("--types") and "repartition prompt" in written("--inserted")
    refused = CliRunner().invoke(main, ["plan", "grpo", "--types"])
    assert refused.exit_code == 2 and "for pictures" in refused.stderr


TWO_POOLS = """
graph: two_pools
extends: grpo
edits:
  - add: {pools.train: {devices: 4}, pools.gen: {devices: 4}}
  - remove: [pools.main]
"""


@needs_graphviz
@pytest.mark.parametrize("direction", ["down", "right"])
def test_two_pools_are_drawn_in_full_size_on_1300_pixels(
    direction: Literal["down", "right"], tmp_path: Path
) -> None:
    (tmp_path / "two_pools.yaml").write_text(TWO_POOLS)
    plan = compile_graph(str(tmp_path / "two_pools.yaml"))
    image = picture(plan, "svg", DrawingOptions(direction=direction)).decode()
    (points,) = re.findall(r'<svg width="(\d+)pt"', image)
    assert int(points) * 96 / 72 <= 1300  # so that labels of 9 points are as high as those of a page


@pytest.mark.parametrize("form", ["mermaid", "dot", "html", "trace"])
def test_plan_writes_each_form(form: str) -> None:
    result = CliRunner().invoke(main, ["plan", "grpo", "--devices", "2", "--format", form])
    start = {"mermaid": "flowchart TD", "dot": "digraph", "html": "<!doctype html>", "trace": "{"}[form]
    assert result.exit_code == 0 and result.stdout.startswith(start)


def test_against_prints_words_alone() -> None:
    result = CliRunner().invoke(main, ["plan", "grpo", "--against", "x.json", "--format", "dot"])
    assert result.exit_code == 2 and "leave out --format dot" in result.stderr


def test_show_prints_a_tree() -> None:
    lines = CliRunner().invoke(main, ["show", "ppo", "--tree"]).stdout.splitlines()
    assert lines[:3] == [
        "in every iteration",
        "└─ prompts (data.prompts)",
        "   └─ rollout (rollout) with policy@v  reads prompt",
    ]
    assert sum("─ " in line for line in lines) == 10  # each node once
    assert all(len(line) <= 100 for line in lines)


def test_a_move_of_an_engine_reads_no_version() -> None:
    plan = compile_graph("grpo", devices=1)
    last = plan.steps[-1]
    move = MoveEngine("policy", "train", "off", ("parameters",))
    moved = replace(last, id=last.id + 1, node="offload", reads=(), writes=(), frees=(), after=(last.id,))
    moved = replace(moved, action=move, because="it would not fit")
    plan = replace(plan, steps=(*plan.steps, moved), slot=(*plan.slot, moved.id))
    for text in (mermaid(plan, EVERYTHING), dot(plan, EVERYTHING), trace(plan)):
        assert "offload parameters of policy" in text
        assert 'policy@"' not in text


@pytest.mark.parametrize(
    ("name", "start"),
    [("x.mmd", "flowchart"), ("x.dot", "digraph"), ("x.html", "<!doctype"), ("x.txt", "plan of")],
)
def test_the_file_s_name_says_the_form(name: str, start: str, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["plan", "grpo", "-o", str(tmp_path / name)]).exit_code == 0
    assert (tmp_path / name).read_text().startswith(start)


@needs_graphviz
@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n")])
def test_graphviz_makes_pictures(kind: str, start: bytes, tmp_path: Path) -> None:
    out = tmp_path / f"grpo.{kind}"
    assert CliRunner().invoke(main, ["plan", "grpo", "--devices", "2", "-o", str(out)]).exit_code == 0
    assert out.read_bytes().startswith(start)
    printed = CliRunner().invoke(main, ["plan", "grpo", "--devices", "2", "--format", kind])
    assert printed.stdout_bytes == out.read_bytes()
    rlgraph.load("grpo").plan(devices=2).picture(tmp_path / f"api.{kind}")
    assert (tmp_path / f"api.{kind}").read_bytes() == out.read_bytes()


def test_without_graphviz_pictures_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "grpo.png"
    result = CliRunner().invoke(main, ["plan", "grpo", "--devices", "2", "-o", str(out)])
    assert result.exit_code == 1 and "apt-get install graphviz" in result.stderr
    assert not out.exists()
    with pytest.raises(RunError, match="a picture is svg or png, and not `gif`"):
        rlgraph.load("grpo").plan(devices=2).picture("x.gif")
