"""Adds pages to the site of the documents: the README as its first, a list of decisions, and the notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the README as the first page, with its links to pages as seen from there, and the list."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"), reverse=True)
    titles = (page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages)
    listed = [
        f"- {page.name[:10]}: [{title}]({page.name})\n" for page, title in zip(pages, titles, strict=True)
    ]
    content = "# Decisions\n\nWhy things are as they are, the newest first.\n\n" + "".join(listed)
    files.append(File.generated(config, "decisions/index.md", content=content))
    files.append(File.generated(config, "tour.md", content=_notebook_page(ROOT / "docs" / "tour.ipynb")))
    return files


def _notebook_page(path: Path) -> str:
    """Return a notebook's cells as Markdown, with a link to the notebook below its title."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    blocks = []
    for cell in cells:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        blocks.append(f"```python\n{source}\n```" if is_code else source)
    title, _, rest = blocks[0].partition("\n\n")
    link = f"[Download the notebook]({path.name}), and open it in Jupyter."
    return "\n\n".join([title, link, rest, *blocks[1:]]) + "\n"


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Take the links off what is not on the site, such as graphs and benchmarks."""

    def kept(found: re.Match[str]) -> str:
        text, target = found.groups()
        place = (ROOT / "docs" / page.file.src_uri).parent / target.partition("#")[0]
        if page.file.src_uri == "index.md" and not place.exists():
            place = ROOT / target.partition("#")[0]
        inside = place.resolve().is_relative_to(ROOT / "docs") and place.is_file()
        return found[0] if inside or not place.exists() else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", kept, markdown)
