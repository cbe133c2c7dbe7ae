"""Pages by axe-core's rules, and what it does not judge: contrast in charts, and what is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlgraph.ir.plan import Target
from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import page
from rlgraph.view.subject import subject

TARGET = Target("h100-8")
AXE = Path(__file__).parents[2] / ".venv" / "axe.min.js"
SIZES = ((1400, 1000), (768, 1000), (420, 860))
TEXTS = (".bar text", ".node text", ".label", ".small", ".edge text", ".group > text", ".lane text")
PANELS = (("grpo", "graph"), ("grpo", "diff"), ("ahead", "graph"), ("ahead", "plan"), ("run", "run"))
PANELS += (("stream-plan", "plan"), ("stream-run", "run"))
PANELS += (("compared", "diff"), ("compared", "run"), ("sweep", "sweep"))
RULES = "axe.run(document, {resultTypes: ['violations']}).then((found) => arguments[0](found.violations))"

# the least contrast of the texts that a selector finds against what is filled behind them
LEAST = """
const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const channels = (colours) => {
  for (const colour of colours) {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
  }
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((byte) => byte / 255);
};
const light = (colours) => {
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = channels(colours).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = getComputedStyle(document.body).backgroundColor;
const [panel, selector] = arguments;
const texts = [...document.querySelectorAll(`#panel-${panel} ${selector}`)];
const found = texts.filter((text) => text.textContent).map((text) => {
  const drawn = text.parentElement;
  const box = drawn.matches(".bar, .node") ? drawn.querySelector("rect:not(.behind)") : null;
  const behind = [paper, ...(box ? [getComputedStyle(box).fill] : [])];
  const [low, high] = [light([...behind, getComputedStyle(text).fill]), light(behind)].sort((a, b) => a - b);
  return {ratio: (high + 0.05) / (low + 0.05), text: text.textContent};
});
return found.sort((a, b) => a.ratio - b.ratio).slice(0, 1);
"""

# texts and boxes of pictures that lie beyond the frame or the chart that they are drawn in
CUT = """
const outer = document.querySelector(arguments[0]).getBoundingClientRect();
return [...document.querySelectorAll(`${arguments[0]} :is(text, .node)`)].filter((part) => {
  const {left, right, width} = part.getBoundingClientRect();
  return width && (left < outer.left - 1 || right > outer.right + 1);
}).map((part) => part.textContent);
"""


# texts outside of pictures that lie beyond the panel or the header, but for tables that can be scrolled
CUT_TEXT = """
const texts = ":is(h1, h2, p, li, dt, dd, td, th, summary, button, input, select, figure, figcaption, pre)";
const outer = document.querySelector(`#panel-${arguments[0]}`).getBoundingClientRect();
const scrolls = (box) => box && box.scrollWidth > box.clientWidth;
const found = document.querySelectorAll(`:is(#head, #headline, #panel-${arguments[0]}) ${texts}`);
return [...found].filter((part) => {
  const {left, right, width} = part.getBoundingClientRect();
  const isBeyond = left < outer.left - 1 || right > outer.right + 1;
  return width && isBeyond && !scrolls(part.closest(".scroll"));
}).map((part) => part.outerHTML.slice(0, 200));
"""


WIDER = """
const panel = document.querySelector(`#panel-${arguments[0]}`);
return panel.scrollWidth - panel.clientWidth;
"""


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory,
    run_dir: Path,
    ahead: Path,
    streamed: dict[str, Path],
    compared: Path,
    sweep_folder: Path,
) -> dict[str, Path]:
    """A graph beside another, a plan of two pools, a run, of each one that streams, two runs, and a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    shown = {
        "grpo": contents(
            subject(PlanRequest("grpo", target=TARGET)), subject(PlanRequest("ppo", target=TARGET))
        ),
        "run": contents(subject(PlanRequest(str(run_dir)))),
        "long": contents(subject(PlanRequest("grpo", ["rollout.n=2048"], target=TARGET))),
    }
    for name, told in shown.items():
        (folder / f"{name}.html").write_text(page(told))
    streams = {f"stream-{name}": path for name, path in streamed.items()}
    several = {"compared": compared, "sweep": sweep_folder / "sweep.html"}
    return {"ahead": ahead, **streams, **several, **{name: folder / f"{name}.html" for name in shown}}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_axe_finds_nothing_and_nothing_is_cut(
    browser: Any, pages: dict[str, Path], name: str, panel: str, size: tuple[int, int]
) -> None:
    if not AXE.is_file():
        pytest.skip(f"axe-core is not here ({AXE}): make browser (npm pack axe-core)")
    for dark in (False, True):
        browser.look(*size, dark=dark)
        browser.open(pages[name], panel)
        browser.shot(f"{name}-{panel}-{size[0]}-{'dark' if dark else 'light'}")
        browser.do(AXE.read_text())
        violations = browser.driver.execute_async_script(RULES)
        assert not violations, [(found["id"], found["nodes"][0]["html"]) for found in violations]
        for selector in TEXTS:
            for least in browser.do(LEAST, panel, selector):
                assert least["ratio"] >= 4.5, (selector, least, dark)
        picture = {"plan": "svg.time", "run": "svg.time", "sweep": ".charts"}.get(panel, ".frame")
        assert browser.do(CUT, f"#panel-{panel} {picture}") == []
        assert browser.do(CUT_TEXT, panel) == []
        if "stream" in name:
            assert browser.do(CUT, f"#panel-{panel} [data-chart=stream] svg") == []
        assert browser.do(WIDER, panel) <= 0
    browser.look(1400, 900)


def test_ticks_are_round_in_the_unit_that_they_have(browser: Any, pages: dict[str, Path]) -> None:
    browser.look(1400, 900)
    browser.open(pages["long"], "plan")
    browser.settle()
    browser.click("#panel-plan .choice button:last-child")
    said = browser.do(
        "return [...document.querySelectorAll('svg.time .tick + text')].map((t) => t.textContent)"
    )
    units = {text.partition(" ")[2] for text in said[1:]}
    steps = [float(text.partition(" ")[0]) for text in said]
    assert said[0] == "0" and len(units) == 1 and units <= {"min", "h"}
    assert steps[1] in (1, 2, 5, 10, 20, 50, 100) and steps == [steps[1] * n for n in range(len(steps))]


def test_fit_shows_the_whole_graph_on_a_phone(browser: Any, pages: dict[str, Path]) -> None:
    browser.look(420, 860)
    browser.open(pages["grpo"], "graph")
    browser.do("page.panels.graph.inserted.click()")
    for _ in range(3):
        browser.do("page.graph.navigation.zoom(1.5)")
    assert browser.do(CUT, "#panel-graph .frame")
    browser.do(
        "[...document.querySelectorAll('#panel-graph button')].find((b) => b.textContent === 'fit').click()"
    )
    assert browser.do(CUT, "#panel-graph .frame") == []
    browser.look(1400, 900)


def test_a_search_goes_to_the_step_of_that_name_first(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["grpo"], "graph")
    browser.type("/")
    browser.type("update_policy\ue007")  # Enter
    assert browser.text("#detail h2") == "update_policy"
    browser.type("\ue007")
    assert browser.text("#detail h2") != "update_policy"


def test_addresses_and_the_back_button_lead_to_panels(browser: Any, pages: dict[str, Path]) -> None:
    shown = "return document.querySelector('.panel:not([hidden])').id"
    browser.open(pages["run"], "graph")
    browser.click("#tab-plan")
    assert browser.do("return location.hash") == "#plan" and browser.do(shown) == "panel-plan"
    browser.do("location.hash = '#samples'")
    browser.settle()
    assert browser.do(shown) == "panel-run"
    assert browser.do("return document.querySelector('#panel-run').scrollTop") > 300
    for panel in ("panel-plan", "panel-graph"):
        browser.driver.back()
        browser.settle()
        assert browser.do(shown) == panel


def test_edges_that_a_diff_adds_and_removes_look_so(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["grpo"], "diff")
    edges = "return page.panels.diff.graph.edges.filter((edge) => edge.link.status === arguments[0]).length"
    assert browser.do(edges, "removed") == browser.count("#panel-diff .edge.removed") > 5
    look = "return getComputedStyle(document.querySelector(`#panel-diff .edge${arguments[0]} .line`)).stroke"
    assert browser.do(look, ":not(.removed, .added)") != browser.do(look, ".removed")


def test_rings_say_which_step_reads(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["grpo"], "graph")
    said = browser.do(
        "return [...document.querySelectorAll('[data-model=policy] .reader')].map((t) => t.textContent)"
    )
    assert said == ["sync policy", "rollout", "old_logprobs", "update_policy"]


def test_names_and_places_are_not_cut_where_there_is_room(browser: Any, pages: dict[str, Path]) -> None:
    browser.look(1400, 900)
    browser.open(pages["ahead"], "plan")
    browser.settle()
    shown = "return [...document.querySelectorAll('#panel-plan .label')].map((t) => t.firstChild.data)"
    labels = browser.do(shown)
    assert "policy.train parameters" in labels and not [label for label in labels if "…" in label]
    browser.open(pages["grpo"], "graph")
    browser.do("page.find('update_policy')")
    lines = """return [...document.querySelectorAll('#detail table.small td:last-child span')]
      .map((place) => [place.textContent, place.getBoundingClientRect().height < 24])"""
    places = dict(browser.do(lines))
    assert set(places) >= {"ppo.yaml:39", "as sampled", "default"} and all(places.values())
