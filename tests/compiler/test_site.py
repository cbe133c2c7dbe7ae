"""The site of the documents: every page is in its index, every link leads somewhere, nothing is fetched."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_first_page_is_the_readme(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "An algorithm is a few lines" in page
    assert 'href="language.html"' in page and "](" not in re.sub(
        r"<code>.*?</code>", "", page, flags=re.DOTALL
    )


def test_pages_ask_for_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|link)\b[^>]*?(?:src|href)="?(https?://[^\s">]+)""")
    canonical = re.compile(r"rel=.?canonical")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found = [tag.group(1) for tag in loaded.finditer(text) if not canonical.search(tag.group(0))]
        assert not found, (page.name, found)


def test_the_notebook_is_a_page_and_a_file(site: Path) -> None:
    notebook = ROOT / "docs" / "tour.ipynb"
    assert (site / "tour.ipynb").read_bytes() == notebook.read_bytes()
    page = (site / "tour.html").read_text(encoding="utf-8")
    assert 'href="tour.ipynb"' in page
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert "".join(cell["source"]) in shown


def test_nothing_but_documents_is_published(site: Path) -> None:
    published = [path.relative_to(site) for path in site.rglob("*")]
    assert not [path for path in published if path.suffix in (".py", ".pyc") or "__pycache__" in path.parts]


def test_the_search_needs_no_server(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="assets/iframe-worker.js"' in page, "a worker can't be started from a file"
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index =")


def test_every_decision_is_listed(site: Path) -> None:
    listed = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        assert f'href="{page.stem}.html"' in listed


def test_advice_names_metrics_and_settings_that_there_are() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:reward|rollout|perf|NODE)/[A-Za-z_/-]+)`", page))
    assert named
    assert not {metric for metric in named if metric.replace("/update_policy", "/NODE") not in metrics}
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    settings = set(
        re.findall(r"`(?:models\.\w+\.)?(?:train|serve|schedule|rollout|update_policy)\.(\w+)", page)
    )
    known = set(re.findall(r"\| `(\w+)` \|", reference)) | {"from", "partial"}
    assert settings
    assert not settings - known
    ops = set(re.findall(r"`((?:filter|correction|reward|advantage)\.\w+)`", page))
    assert not {op for op in ops if f"# {op}\n" not in reference}
