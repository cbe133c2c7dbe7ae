"""The page of a run says what it reached; those of two runs and of a sweep overlay their curves."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.ops.metric import OF_ROWS
from rlgraph.reports.outcome import is_score
from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import ASSETS, page
from rlgraph.view.subject import subject

PLOTTED = "return page.panels.diff.charts.plots.map((plot) => plot.data.map((values) => [...values]))"
CAPTIONS = "return [...document.querySelectorAll('figcaption')].map((each) => each.firstChild.textContent)"
FIRST_RUN, SECOND_RUN = "minibatches=1,seed=0", "minibatches=2,seed=0"


def test_the_headline_of_a_run_is_what_was_measured(browser: Any, sweep_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    folder = sweep_folder / FIRST_RUN
    path.write_text(page(contents(subject(PlanRequest(str(folder))))))
    started = json.loads((folder / "environment.json").read_text())["started"]
    date = f"{started[:10]} {started[11:16]} UTC"
    browser.look(1400, 900)
    for panel in ("run", "graph", "plan"):
        browser.open(path, panel)
        said = browser.text("#headline summary")
        measured, _, predicted = said.partition("; ")
        assert predicted.startswith("predicted on auto-cpu-")
        assert measured == (
            "accuracy 0.1 -> 0.55 in 27 s, 10 iterations, 1.5 s per iteration, 2,000 tokens per second, "
            + date
        )


def test_counts_of_rows_are_no_scores_on_a_page(browser: Any, compared: Path) -> None:
    browser.look(1400, 900)
    browser.open(compared)
    names = [*(f"eval/{name}" for name in OF_ROWS), "eval/accuracy", "eval/rollout/length"]
    scores = browser.do(f"return {json.dumps(names)}.filter(isScore)")
    assert scores == ["eval/accuracy"] == [name for name in names if is_score(name)]


def test_the_page_of_two_runs_names_both_and_overlays_their_curves(browser: Any, compared: Path) -> None:
    browser.look(1400, 900)
    browser.complaints()
    browser.open(compared)
    browser.settle()
    assert not browser.do("return document.getElementById('panel-diff').hidden"), "it opens there"
    said = browser.text("#panel-diff p")
    assert f"{FIRST_RUN} (demo)" in said and f"{SECOND_RUN} (demo)" in said
    assert 'about: "2 minibatches" -> "1 minibatches"' in browser.text("#panel-diff .edits")
    headline = browser.text("#headline summary")
    assert "accuracy 0.1 -> 0.55 in 27 s" in headline and "accuracy 0.2 -> 0.65 in" in headline
    assert browser.do(CAPTIONS)[:2] == ["reward/mean", "eval/accuracy"]
    assert browser.count("#panel-diff .lines button") == 2
    assert browser.text("#panel-diff .lines button").endswith("(2 runs)")
    # iterations; then the highest, the lowest and the mean of each line
    steps, *values = browser.do(PLOTTED)[1]
    assert steps == [0, 2, 4, 6, 8, 10] and len(values) == 6
    high, low, mean = (line[0] for line in values[:3])
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.16)) and mean == pytest.approx(0.13)
    assert browser.complaints() == []


def test_lines_can_be_hidden_and_any_metric_shown(browser: Any, compared: Path) -> None:
    browser.open(compared)
    browser.settle()
    browser.click("#panel-diff .lines button")
    assert len(browser.do(PLOTTED)[0]) == 4, "iterations, and one line with its band"
    browser.click("#panel-diff .lines button")
    assert len(browser.do(PLOTTED)[0]) == 7
    browser.click("#panel-diff input[type=search]")
    browser.type("eval/rows")
    assert browser.do(CAPTIONS) == ["eval/rows"]


def test_the_page_of_a_sweep_has_axes_a_legend_and_every_metric(browser: Any, sweep_folder: Path) -> None:
    browser.look(1400, 900)
    browser.complaints()
    browser.requests()
    browser.open(sweep_folder / "sweep.html")
    browser.settle()
    assert "5 of 6" in browser.text("#headline summary")
    assert "highest eval/accuracy 0.655 with minibatches=2" in browser.text("#headline summary")
    text = browser.text("#panel-sweep")
    for words in ("0.593 ± 0.067", "0.655 ± 0.007 *", "* marks the highest mean", "minibatches=1 (3 runs)"):
        assert words in text, words
    assert "has not begun" in browser.text("#panel-sweep h2#runs + .scroll")
    assert browser.count("#panel-sweep canvas") == 6
    browser.click("#panel-sweep [title='show every metric']")
    assert browser.count("#panel-sweep canvas") > 6
    across = "return [...document.querySelectorAll('figure')].map((each) => each.getBoundingClientRect().top)"
    assert len({*browser.do(across)[:3]}) == 1, "three charts stand side by side at this width"
    browser.type("d")
    assert browser.do("return document.documentElement.dataset.theme") == "dark"
    assert browser.complaints() == []
    assert not [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))]


def test_only_runs_are_overlaid(sweep_folder: Path) -> None:
    arguments = ["view", "grpo", "--against", "ppo", "--against", str(sweep_folder / FIRST_RUN)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "give only runs" in result.output


def test_group_numbers_have_no_colour_and_rewards_do(
    browser: Any, sweep_folder: Path, tmp_path: Path
) -> None:
    made = contents(subject(PlanRequest(str(sweep_folder / FIRST_RUN))))
    for file in made["run"]["samples"]["files"].values():
        for row in file["rows"]:
            row |= {"group": 1, "rewards": 1.0}
    path = tmp_path / "run.html"
    path.write_text(page(made))
    browser.open(path, "run")
    browser.settle()
    styles = browser.do(
        "return [...document.querySelectorAll('.sample:first-child .value')]"
        ".map((each) => [each.textContent, each.getAttribute('style') || ''])"
    )
    assert dict(styles)["group 1"] == "" and "background" in dict(styles)["rewards 1"]


def test_parts_of_memory_can_be_told_apart() -> None:
    """Held to at least 0.15 of OKLab's distance; black and white are 1 apart."""
    style = (ASSETS / "page.css").read_text()
    parts = re.findall(r"\.part-[\w-]+ \{ --part: light-dark\((#\w{6}), (#\w{6})\)", style)
    assert len(parts) == 12
    for theme, paper in ((0, "#ffffff"), (1, "#10151c")):
        colours = [part[theme] for part in parts]
        for a, b in itertools.combinations([*colours, paper], 2):
            assert distance(a, b) >= 0.15, (a, b)


def distance(a: str, b: str) -> float:
    """Return the distance of two colours in OKLab (https://bottosson.github.io/posts/oklab)."""
    return sum((x - y) ** 2 for x, y in zip(oklab(a), oklab(b), strict=True)) ** 0.5


def oklab(colour: str) -> tuple[float, float, float]:
    red, green, blue = (linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
