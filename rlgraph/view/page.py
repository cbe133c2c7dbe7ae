"""A page of one file: what it shows as data, the scripts and styles that draw it, and no request.

Everything that comes from graphs, files, models and errors is in the data, a block that no browser executes;
the scripts set it as text. The page's own policy admits exactly these scripts, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlgraph.ops.metric import OF_ROWS

ASSETS = Path(__file__).parent / "assets"
VENDORED = ("dagre.min.js", "uPlot.iife.min.js")
SCRIPTS = (
    "elements.js", "layout.js", "fold.js", "graph.js", "detail.js", "graphpanel.js", "lanes.js", "stream.js",
    "plan.js", "diff.js", "samples.js", "environment.js", "charts.js", "run.js", "page.js",
)  # fmt: skip
SWEEP_VENDORED = ("uPlot.iife.min.js",)
SWEEP_SCRIPTS = ("elements.js", "charts.js", "sweep.js")
CONSTANTS = f"const OF_ROWS = {json.dumps(OF_ROWS)};"  # what scripts share with Python
STYLES = ("vendor/uPlot.min.css", "page.css")
UNSAFE = re.compile("[<>&\u2028\u2029]")


def page(contents: dict[str, Any], follow: str = "") -> str:
    """Return the text of an HTML file that shows the result of ``contents.contents``.

    ``follow`` is the address of newer contents on the server that serves the page; empty: it asks for none.
    """
    data = {**contents, "follow": follow}
    return _document(contents["graph"], VENDORED, SCRIPTS, data, follow)


def sweep_page(contents: dict[str, Any]) -> str:
    """Return the text of an HTML file that shows a sweep, with the charts and the style of a run's page."""
    return _document(contents["graph"], SWEEP_VENDORED, SWEEP_SCRIPTS, contents)


def _document(
    title: str, vendored: Sequence[str], sources: Sequence[str], data: dict[str, Any], follow: str = ""
) -> str:
    own = "\n".join([CONSTANTS, *map(_read, sources)])
    scripts = [*(_read(f"vendor/{name}") for name in vendored), own]
    licences = [f"{name.partition('.')[0]}.LICENSE" for name in vendored]
    policy = _policy(scripts, follow)
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)} - rlgraph</title>",
        *(f"<style>\n{_read(name)}</style>" for name in STYLES),
        "</head>",
        "<body><!--",
        *(f"{name.partition('.')[0]}\n{_read(f'vendor/{name}')}" for name in licences),
        "-->",
        "<noscript>This page draws itself with JavaScript, which is off here.</noscript>",
        f'<script type="application/json" id="contents">{embedded(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "".join(f"{line}\n" for line in lines)


def embedded(value: Any) -> str:
    """Return JSON that may stand within a script element: none of its characters can end it.

    Example:
        >>> embedded("</script>")
        '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return UNSAFE.sub(lambda unsafe: f"\\u{ord(unsafe[0]):04x}", text)


def _policy(scripts: Iterable[str], follow: str) -> str:
    hashes = []
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(hashes)}",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if follow:
        rules.append("connect-src 'self'")
    return "; ".join(rules)


@cache
def _read(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    return re.sub(r"//# sourceMappingURL=.*\n?", "", text)
