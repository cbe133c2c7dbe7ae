"""The graph that an importer makes, for tests of importers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlgraph.check import check_report
from rlgraph.frontend.compose import compose
from rlgraph.importing.importer import Imported
from rlgraph.request import PlanRequest


def graph_of(imported: Imported) -> dict[str, Any]:
    """The composed graph, in which `check` finds nothing wrong."""
    Path("out.yaml").write_text(imported.graph())
    report = check_report(PlanRequest("out.yaml"))
    assert not report["problems"], report
    return dict(compose("out.yaml").plain())
