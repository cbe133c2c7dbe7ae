"""The Python API: the command line's verbs, as ``rlgraph.load("grpo").edit("rollout.n=16").plan("h100-8")``.

What they return shows itself in a notebook as ``rlgraph view`` shows it in a browser.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlgraph.compiler import Compilation
from rlgraph.costs.detect import local_device
from rlgraph.errors import RunError
from rlgraph.frontend.compose import as_written, setting
from rlgraph.frontend.edits import apply
from rlgraph.frontend.graph_diff import diff_text, diff_trees, diff_yaml
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.measured import metrics_so_far, read_metrics
from rlgraph.request import PlanRequest
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow, show_text
from rlgraph.view.contents import contents
from rlgraph.view.drawings.dot import dot, picture
from rlgraph.view.drawings.drawing_options import DrawingOptions
from rlgraph.view.drawings.mermaid import mermaid
from rlgraph.view.page import page
from rlgraph.view.recorded import read_timeline
from rlgraph.view.subject import Subject, recorded
from rlgraph.view.trace import trace

Edit = Mapping[str, Any]  # a mapping such as {"remove": ["values"]}
HEIGHT = 640  # pixels in a notebook


def load(graph: str | Path, *settings: str) -> Algorithm:
    """Load a graph, by its path or the name of a shipped one, with settings such as ``"rollout.n=16"``.

    Raises:
        GraphError: there is no such graph, or a file or a setting is wrong.
    """
    return Algorithm(str(graph)).edit(*settings)


def diff(a: str | Algorithm, b: str | Algorithm) -> Difference:
    """Return the edits that turn graph ``a`` into graph ``b``.

    Raises:
        GraphError: one of them is not there, or a file or an edit is wrong.
    """
    loaded_a = load(a) if isinstance(a, str) else a
    loaded_b = load(b) if isinstance(b, str) else b
    return Difference(loaded_a, loaded_b)


@dataclass(frozen=True)
class Algorithm:
    """A graph with changes to it: settings first, then edits. Each change gives a new one."""

    graph: str
    settings: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()

    def edit(self, *settings: str, **words: Any) -> Algorithm:
        """Return the graph with changes: ``key=value`` as on the command line, or edits as in a file.

        Args:
            settings: such as ``"rollout.n=16"``.
            words: ``set``, ``remove``, ``replace``, ``add``, ``insert``, ``rename`` with what each takes in a
                file, in the order in which they are given. Paths in them start at the working folder.

        Raises:
            GraphError: there is no such edit, or it names what is not there.
            RunError: settings come behind edits.

        Example:
            >>> ours = load("ppo").edit(remove=["values", "update_critic", "shaped", "models.critic"])
            >>> ours = ours.edit(replace={"advantages": {"op": "advantage.grpo"}}, set={"rollout.n": 8})
            >>> [line.split()[0] for line in str(diff("ppo", ours)).splitlines()]
            ['remove', 'remove', 'remove', 'remove', 'replace', 'set']
        """
        if settings and self.edits:
            raise RunError(f"{settings[0]} comes behind edits\n  write it as an edit too: set={{...}}")
        edits, settings = self.edits, (*self.settings, *settings)
        for word, content in words.items():
            if word == "set" and not edits:  # a plan can record these as settings
                for name, value in content.items():
                    settings = (*settings, f"{name}={flow(value)}")
            else:
                edits = (*edits, {word: content})
        edited = replace(self, settings=settings, edits=edits)
        edited.tree()
        return edited

    def written(self) -> Tree:
        """Return the graph with its ``${...}`` still in place."""
        tree = as_written(self.graph, self.settings)
        for edit in self.edits:
            tree = apply(tree, Tree.of(edit))
        return tree

    def tree(self) -> Tree:
        """Return the composed graph."""
        return self._compilation().tree

    def check(self) -> Algorithm:
        """Return the same graph, if nothing is wrong with it.

        Raises:
            GraphError: with every problem found.
        """
        _ = self._compilation(devices=0).plan
        return self

    def plan(self, cluster: str | None = None, *, devices: int | None = None, **sizes: Any) -> Planned:
        """Return the graph's plan.

        Args:
            cluster: plan for this one, as ``h100-8``: predict seconds and memory.
            devices: or for so many; those of this machine unless given.
            sizes: what is assumed on ``cluster``, as ``Target`` has it, such as ``response_tokens``.

        Raises:
            GraphError: with every problem found, or how it does not fit.
            RunError: the cluster is a number.
        """
        if isinstance(cluster, int):
            law = f"plan({cluster}) names no cluster"
            raise RunError(
                f"{law}\n  for so many devices: plan(devices={cluster}); for a cluster: plan('h100-8')"
            )
        target = Target(cluster, **sizes) if cluster else None
        return Planned(self._compilation(devices, target, local_device()).plan)

    def _compilation(
        self, devices: int | None = None, target: Target | None = None, device: str = "cpu"
    ) -> Compilation:
        edited = self._with_heading(self.written())
        return Compilation(
            PlanRequest(self.graph, self.settings, devices, target, device=device, edited=edited)
        )

    def _with_heading(self, tree: Tree) -> Tree:
        """Return the edited graph with an ``about`` that says so, unless an edit has written one.

        That of its file describes what the graph was before.
        """
        about = tree.get("about")
        is_of_file = about == as_written(self.graph, self.settings).get("about")
        if not self.edits or not is_of_file:
            return tree
        kinds = dict.fromkeys(kind for edit in self.edits for kind in edit)
        return tree.with_item("about", Tree.of(f"{self.graph} with edits in Python ({', '.join(kinds)})"))

    def save(self, path: str | Path) -> Algorithm:
        """Write it as a graph that extends this one by its edits, and load that."""
        path = Path(path)
        parent = self.graph
        if parent not in shipped_graphs():
            parent = os.path.relpath(parent, path.parent)
        edits = []
        for text in self.settings:
            name, value = setting(text)
            edits.append({"set": {name: value.plain()}})
        edits += map(dict, self.edits)
        head = f"graph: {flow(path.stem)}\nextends: {flow(parent)}\n"
        path.write_text(head + diff_yaml(edits), encoding="utf-8")
        return load(path)

    def run(self, cluster: str | None = None, *, devices: int | None = None, **options: Any) -> Run:
        """Train.

        Args:
            cluster: plan for this one, as ``auto``, this machine.
            devices: how many ``auto`` stands for.
            options: ``steps``, ``run_dir``, ``resume``, ``address`` and ``inline``, as of `rlgraph run`.

        Raises:
            GraphError: the graph, or a file that it names, is wrong.
            RunError: it has edits that no file holds yet, or the run could not start, or failed.
        """
        if self.edits:
            law = "a run says which file it was made from, and these edits are in none"
            raise RunError(f"{law}\n  save them first: .save('mine.yaml').run()")
        from rlgraph.runtime.run import run_graph

        if "run_dir" in options:
            options["run_dir"] = Path(options["run_dir"])
        target = Target(cluster) if cluster else None
        return Run(run_graph(self.graph, self.settings, devices, target=target, **options))

    def __str__(self) -> str:
        return show_text(self.tree().written())

    def _repr_html_(self) -> str:
        return self.plan()._repr_html_()


class Page:
    """A page: written to a file, or shown in a notebook within another page, which it can't reach."""

    def html(self) -> str:
        """Return it as one HTML file."""
        raise NotImplementedError

    def view(self, path: str | Path) -> None:
        """Write it as one HTML file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        content = html.escape(self.html())
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'


@dataclass(frozen=True)
class Planned(Page):
    """A graph's plan for some devices. ``plan`` holds it as data."""

    plan: Plan
    compiled: bool = True  # whether the files of its ops were loaded to make it

    def __str__(self) -> str:
        return plan_text(self.plan)

    def json(self) -> str:
        """Return it as JSON, for `rlgraph run`."""
        return self.plan.json() + "\n"

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `rlgraph run`."""
        Path(path).write_text(self.json(), encoding="utf-8")

    def html(self) -> str:
        return page(contents(Subject(self.plan, compiled=self.compiled)))

    def mermaid(self, **options: Any) -> str:
        """Return it as a mermaid flowchart; ``options`` as of ``picture``."""
        return mermaid(self.plan, DrawingOptions(**options))

    def dot(self, **options: Any) -> str:
        """Return it as a graph for graphviz; ``options`` as of ``picture``."""
        return dot(self.plan, DrawingOptions(**options))

    def picture(self, path: str | Path, **options: Any) -> None:
        """Write a picture of the graph, ``.svg`` or ``.png``, which graphviz draws.

        Args:
            path: of the file, whose ending says which kind it is.
            options: ``types=True`` writes types on arrows, ``inserted=True`` shows the steps that rlgraph
                inserted, ``direction="right"`` has it run from left to right.

        Raises:
            RunError: graphviz is not here, or the file is named otherwise.
        """
        path = Path(path)
        path.write_bytes(picture(self.plan, path.suffix.removeprefix("."), DrawingOptions(**options)))

    def trace(self) -> str:
        """Return it as a timeline for ui.perfetto.dev."""
        return trace(self.plan)


@dataclass(frozen=True)
class Difference(Page):
    """The edits that turn graph ``a`` into graph ``b``; false where there are none."""

    a: Algorithm
    b: Algorithm

    @property
    def edits(self) -> list[dict[str, Any]]:
        """Return the ``edits`` of a graph that extends ``a`` and equals ``b``."""
        return diff_trees(self.a.written(), self.b.written())

    def __bool__(self) -> bool:
        return bool(self.edits)

    def __str__(self) -> str:
        return diff_text(self.a.written(), self.b.written())

    def html(self) -> str:
        subject = Subject(self.b.plan().plan, compiled=True)
        compared_with = Subject(self.a.plan().plan, compiled=True)
        return page(contents(subject, compared_with))


@dataclass(frozen=True)
class Run(Page):
    """A run by its folder."""

    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Return one line per iteration, as `metrics.jsonl` holds them, without what was not finite."""
        return read_metrics(self.folder)

    def report(self) -> str:
        """Return a report of where the time went."""
        from rlgraph.reports.report import make_report, report_text  # its tables take 30 ms to import

        return report_text(make_report(self.folder))

    def trace(self) -> str:
        """Return a timeline for ui.perfetto.dev, predicted and measured."""
        plan = recorded(self.folder).plan
        return trace(plan, read_timeline(self.folder), metrics_so_far(self.folder))

    def html(self) -> str:
        return page(contents(recorded(self.folder)))
