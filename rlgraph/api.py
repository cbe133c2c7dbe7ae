"""The command line's verbs as methods: ``rlgraph.load("grpo").edit("rollout.n=16").plan("h100-8")``.

What they return shows itself in a notebook as ``rlgraph view`` shows it in a browser.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgraph.compose import as_written
from rlgraph.diff import as_tree, diff_text, diff_trees, diff_yaml
from rlgraph.edits import apply
from rlgraph.errors import RunError
from rlgraph.interpolate import interpolate
from rlgraph.shipped import shipped_graphs
from rlgraph.text import flow, show_text

if TYPE_CHECKING:
    from rlgraph.plan import Plan, Target
    from rlgraph.source import Tree
    from rlgraph.view.given import Given

Edit = Mapping[str, Any]  # such as {"remove": ["values"]}
HEIGHT = 640  # pixels of what a notebook shows


def load(graph: str | Path, *settings: str) -> Algorithm:
    """A graph, by its path or the name of a shipped one.

    Args:
        graph: as on the command line.
        settings: ``key=value``, such as ``"rollout.n=16"``.

    Raises:
        GraphError: there is no such graph, or a file or a setting is wrong.
    """
    return Algorithm(str(graph)).edit(*settings)


def diff(a: str | Algorithm, b: str | Algorithm) -> Difference:
    """What turns graph ``a`` into graph ``b``.

    Raises:
        GraphError: one of them is not there, or a file or an edit is wrong.
    """
    return Difference(*(load(graph) if isinstance(graph, str) else graph for graph in (a, b)))


@dataclass(frozen=True)
class Algorithm:
    """A graph and what is changed in it: settings first, then edits. Each change gives a new one."""

    graph: str
    settings: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()

    def edit(self, *settings: str, **words: Any) -> Algorithm:
        """With changes: ``key=value`` as on the command line, or edits as in a file.

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
        made = replace(self, settings=(*self.settings, *settings))
        for word, content in words.items():
            made = made._edited(word, content)
        made.tree()
        return made

    def _edited(self, word: str, content: Any) -> Algorithm:
        """Values that are set before any other edit are settings: a plan can say them."""
        if word != "set" or self.edits:
            return replace(self, edits=(*self.edits, {word: content}))
        new = (f"{name}={flow(as_tree(value))}" for name, value in content.items())
        return replace(self, settings=(*self.settings, *new))

    def written(self) -> Tree:
        """The graph with its ``${...}`` still in place."""
        tree = as_written(self.graph, self.settings)
        for edit in self.edits:
            tree = apply(tree, as_tree(dict(edit)))
        return tree

    def tree(self) -> Tree:
        """The composed graph."""
        return interpolate(self.written())

    def check(self) -> Algorithm:
        """The same graph, if nothing is wrong with it.

        Raises:
            GraphError: with every problem found.
        """
        self._planned(None, None)
        return self

    def plan(self, cluster: str | None = None, *, devices: int | None = None, **sizes: Any) -> Planned:
        """What will run.

        Args:
            cluster: plan for this one, as ``h100-8``: predict seconds and memory.
            devices: or for so many; those of this machine unless given.
            sizes: ``prompt_tokens``, ``response_tokens`` and ``calibration``, for ``cluster``.

        Raises:
            GraphError: with every problem found, or how it does not fit.
        """
        from rlgraph.plan import Target

        target = Target(cluster, **sizes) if cluster else None
        return Planned(self._planned(devices, target))

    def _planned(self, devices: int | None, target: Target | None) -> Plan:
        from rlgraph.compiler import plan_composed

        return plan_composed(self.tree(), self.graph, self.settings, devices, target)

    def save(self, path: str | Path) -> Algorithm:
        """Write it as a graph that extends this one by its edits, and load that."""
        folder, path = Path(path).parent, Path(path)
        parent = self.graph if self.graph in shipped_graphs() else os.path.relpath(self.graph, folder)
        settings = "".join(f"  - set: {{{': '.join(text.split('=', 1))}}}\n" for text in self.settings)
        edits = diff_yaml([dict(edit) for edit in self.edits]).partition("\n")[2] if self.edits else ""
        lines = [f"graph: {path.stem}", f"extends: {flow(as_tree(parent))}", "edits:", settings + edits]
        path.write_text("\n".join(lines), encoding="utf-8")
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
        from rlgraph.plan import Target
        from rlgraph.runtime.run import run_graph

        if "run_dir" in options:
            options["run_dir"] = Path(options["run_dir"])
        count = 1 if options.get("inline") else devices
        target = Target(cluster) if cluster else None
        return Run(run_graph(self.graph, self.settings, count, target=target, **options))

    def __str__(self) -> str:
        return show_text(self.tree())

    def _repr_html_(self) -> str:
        return self.plan()._repr_html_()


@dataclass(frozen=True)
class Planned:
    """What will run. ``plan`` holds it as data."""

    plan: Plan

    def __str__(self) -> str:
        from rlgraph.text import plan_text

        return plan_text(self.plan)

    def save(self, path: str | Path) -> None:
        """As JSON, for `rlgraph run`."""
        Path(path).write_text(self.plan.json() + "\n", encoding="utf-8")

    def view(self, path: str | Path) -> None:
        """As one HTML file."""
        Path(path).write_text(_page(self._given()), encoding="utf-8")

    def mermaid(self) -> str:
        """As a mermaid flowchart."""
        from rlgraph.view.mermaid import mermaid

        return mermaid(self.plan)

    def dot(self) -> str:
        """As a graph for graphviz."""
        from rlgraph.view.dot import dot

        return dot(self.plan)

    def picture(self, path: str | Path) -> None:
        """As a picture of the graph, ``.svg`` or ``.png``, which graphviz draws.

        Raises:
            RunError: graphviz is not here, or the file is named otherwise.
        """
        from rlgraph.view.picture import picture

        path = Path(path)
        path.write_bytes(picture(self.plan, path.suffix.removeprefix(".")))

    def trace(self) -> str:
        """As a timeline for ui.perfetto.dev."""
        from rlgraph.view.trace import trace

        return trace(self.plan)

    def _given(self) -> Given:
        from rlgraph.view.given import Given

        return Given(self.plan, compiled=True)

    def _repr_html_(self) -> str:
        return _framed(_page(self._given()))


@dataclass(frozen=True)
class Difference:
    """What turns graph ``a`` into graph ``b``; false where nothing does."""

    a: Algorithm
    b: Algorithm

    @property
    def edits(self) -> list[dict[str, Any]]:
        """What ``edits`` of a graph that extends ``a`` holds."""
        return diff_trees(self.a.written(), self.b.written())

    def __bool__(self) -> bool:
        return bool(self.edits)

    def __str__(self) -> str:
        return diff_text(self.a.written(), self.b.written())

    def _repr_html_(self) -> str:
        return _framed(_page(self.b.plan()._given(), self.a.plan()._given()))


@dataclass(frozen=True)
class Run:
    """A run by its folder."""

    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """A line an iteration, as `metrics.jsonl` holds them."""
        from rlgraph.measured import read_metrics

        return read_metrics(self.folder)

    def report(self) -> str:
        """Where the time went."""
        from rlgraph.report import report_text

        return report_text(self.folder)

    def view(self, path: str | Path) -> None:
        """As one HTML file."""
        Path(path).write_text(self._page(), encoding="utf-8")

    def trace(self) -> str:
        """As a timeline for ui.perfetto.dev, predicted and measured."""
        from rlgraph.view.given import given
        from rlgraph.view.recorded import metrics_so_far, read_timeline
        from rlgraph.view.trace import trace

        return trace(given(str(self.folder)).plan, read_timeline(self.folder), metrics_so_far(self.folder))

    def _page(self) -> str:
        from rlgraph.view.given import given

        return _page(given(str(self.folder)))

    def _repr_html_(self) -> str:
        return _framed(self._page())


def _page(new: Given, old: Given | None = None) -> str:
    from rlgraph.view.contents import contents
    from rlgraph.view.page import page

    return page(contents(new, old))


def _framed(text: str) -> str:
    """A page within another, which it can't reach."""
    style = f"width: 100%; height: {HEIGHT}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(text)}"></iframe>'
