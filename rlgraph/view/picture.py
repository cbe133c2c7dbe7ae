"""A plan as a picture, SVG or PNG: graphviz lays it out."""

from __future__ import annotations

import shutil
import subprocess

from rlgraph.errors import RunError
from rlgraph.plan import Plan
from rlgraph.view.dot import dot

KINDS = ("svg", "png")
MISSING = (
    "pictures are laid out by graphviz, and its program `dot` is not here\n"
    "  install it: apt-get install graphviz, brew install graphviz or conda install graphviz\n"
    "  or write what it reads, and draw that elsewhere: --format dot, or mermaid, which GitHub draws"
)


def picture(plan: Plan, kind: str) -> bytes:
    """A file that shows the graph of a plan.

    Args:
        plan: whose graph.
        kind: svg or png.

    Raises:
        RunError: it is another kind, or graphviz is not here, or failed.
    """
    if kind not in KINDS:
        raise RunError(f"a picture is {' or '.join(KINDS)}, and not `{kind}`")
    if not shutil.which("dot"):
        raise RunError(MISSING)
    command = ["dot", f"-T{kind}", *(["-Gdpi=144"] if kind == "png" else [])]
    ran = subprocess.run(command, input=dot(plan).encode(), capture_output=True, check=False)
    if ran.returncode:
        raise RunError(f"graphviz could not draw {plan.graph}: {ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout
