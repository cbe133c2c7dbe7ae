"""The start of a run, in ``start.json`` of its folder: enough to go on with it, or to run it again.

The graph itself is in ``graph.yaml``. Paths of the command line are relative to ``folder``, the working
folder of then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, RunError
from rlgraph.files import read_json
from rlgraph.frontend.compose import as_written, overridden, setting
from rlgraph.frontend.graph_of_run import graph_of_run
from rlgraph.frontend.kept_graph import GRAPH, START, folders_of
from rlgraph.ir.plan import Target
from rlgraph.request import PlanRequest
from rlgraph.syntax.source import Tree


@dataclass(frozen=True)
class Start:
    """The arguments of a run when it was started, or was resumed last.

    Attributes:
        graph: as it was named.
        overrides: all ``KEY=VALUE`` in effect, those of earlier starts first.
        devices: the number that was asked for; None: those that there were.
        target: the cluster that was asked for.
        address: of a Ray cluster.
        inline: whether everything was in one process.
        track: the trackers.
        steps: iterations in all, where they are not those of the schedule.
        folder: the working folder.
        folders: as ``folders_of`` returns them.
    """

    graph: str
    overrides: Sequence[str] = ()
    devices: int | None = None
    target: Target | None = None
    address: str | None = None
    inline: bool = False
    track: Sequence[str] = ()
    steps: int | None = None
    folder: str = field(default_factory=os.getcwd)
    folders: dict[str, list[Any]] = field(default_factory=dict)

    def text(self, tree: Tree) -> str:
        """Return it as the content of ``start.json``, beside a graph as written."""
        record: dict[str, Any] = dict(vars(replace(self, folders=folders_of(tree))))
        if self.target:
            record["target"] = dataclasses.asdict(self.target)
        return json.dumps(record, indent=1, default=list) + "\n"

    @staticmethod
    def read(run_dir: Path) -> Start:
        """Return how the run in a folder was started.

        Raises:
            RunError: the folder does not say so.
        """
        path = run_dir / START
        if not path.is_file():
            law = f"{run_dir} does not say how it was started (no {START})"
            remedy = "name its graph, with the settings that it had: "
            remedy += f"rlgraph run GRAPH KEY=VALUE ... --resume --run-dir {shlex.quote(str(run_dir))}"
            raise RunError(f"{law}\n  {remedy}")
        record = read_json(path)
        try:
            target = record.pop("target")
            return Start(**record, target=Target(**target) if target else None)
        except (AttributeError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not what rlgraph wrote: {error}") from error

    def request(self, run_dir: Path, overrides: Sequence[str]) -> PlanRequest:
        """Return the request for the run's graph with further settings, seen from the folder of the start.

        Its graph is that of ``graph_of_run``.

        Raises:
            GraphError: the kept graph can't be read, or a setting is wrong.
        """
        graph, before = graph_of_run(run_dir, self.graph, self.overrides)
        overridden(as_written(str(run_dir / GRAPH)), overrides)
        return PlanRequest(graph, (*before, *overrides), self.devices, self.target)


def forgotten(run_dir: Path, graph: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings that a run was started with, which now are left out and would make a difference.

    Raises:
        GraphError: the graph or a setting is wrong.
    """
    if not (run_dir / START).is_file():
        return []
    names = {setting(override)[0] for override in overrides}
    now = as_written(graph, overrides).plain()
    missing = []
    for override in Start.read(run_dir).overrides:
        if setting(override)[0] in names:
            continue
        try:
            then = as_written(graph, (override, *overrides)).plain()
        except GraphError:
            continue  # the graph has no place for it any more
        if then != now:
            missing.append(override)
    return missing
