"""The site of the documents, read from disk: nothing is cut on any screen, and its search finds pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("index", "language", "data", "views", "planning", "cost_model", "algorithms", "tour")
SIZES = ((1400, 1000), (768, 1000), (420, 860))

# blocks of code of which a part can only be seen by scrolling, and whether the page is wider than the window
CUT = """
const isCut = (element) => element.scrollWidth > element.clientWidth + 1;
const code = [...document.querySelectorAll("pre, pre code")].filter(isCut);
const page = isCut(document.documentElement) ? ["page"] : [];
return [...code.map((element) => element.textContent.slice(0, 200)), ...page];
"""

# the rows that a line of 120 characters takes in a block of code of this page
ROWS_OF_120 = """
const code = document.querySelector("pre > code");
const height = (text) => {
  code.textContent = text;
  return code.getBoundingClientRect().height;
};
const [one, two, line] = [height("a"), height("a\\na"), height("a".repeat(120))];
return 1 + (line - one) / (two - one);
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_nothing_is_cut(browser: Any, site: Path, size: tuple[int, int]) -> None:
    for dark in (False, True):
        browser.look(*size, dark=dark)
        for name in PAGES:
            browser.open(site / f"{name}.html")
            assert browser.do(CUT) == [], (name, size)
            if not dark and name in ("index", "tour"):
                browser.shot(f"site-{name}-{size[0]}")
    browser.look(1400, 900)


def test_a_line_of_120_characters_stays_one_line_on_a_desk(browser: Any, site: Path) -> None:
    browser.look(1400, 900)
    browser.open(site / "views.html")
    assert browser.do(ROWS_OF_120) == pytest.approx(1)


def test_the_search_works_from_disk(browser: Any, site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.look(1400, 900)
    browser.complaints()
    browser.open(site / "index.html")
    browser.settle()
    browser.click(".md-search__input")
    browser.type("watchdog")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
    links = WebDriverWait(browser.driver, 20).until(lambda _: browser.do(found))
    assert any("metrics.html" in link for link in links)
    assert browser.complaints() == []
    browser.shot("site-search")
