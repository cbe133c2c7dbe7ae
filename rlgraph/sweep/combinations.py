"""The runs of a sweep: a list where the graph takes one value is swept, each value with all others."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.frontend.compose import as_written, setting
from rlgraph.sweep.list_fields import list_depth
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow

MOST = 256  # letters of a folder's name


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        values: setting that is swept -> its value here, as YAML.
        fixed: the settings that all runs have, as ``key=value``.
    """

    values: Mapping[str, str]
    fixed: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """Its settings, as ``rlgraph run`` takes them."""
        return [*self.fixed, *(f"{name}={value}" for name, value in self.values.items())]

    @property
    def name(self) -> str:
        """The name of its folder, as ``clip=0.1,seed=0``."""
        names = shortened(self.values)
        settings = [f"{name}={value}" for name, value in zip(names, self.values.values(), strict=True)]
        return re.sub(r"[^\w.,=+-]+", "_", ",".join(settings))[:MOST].strip("_.")


def shortened(names: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Return the last word of each name, or as many as tell it from the others.

    Example:
        >>> shortened(["update_policy.loss.clip", "rollout.n", "judge.n"])
        ['clip', 'rollout.n', 'judge.n']
    """
    words_of = [name.split(".") for name in names]
    counts = [1] * len(words_of)
    while True:
        short = [".".join(words[-count:]) for words, count in zip(words_of, counts, strict=True)]
        uses = Counter(short)
        if len(uses) == len(short):
            return short
        for index, name in enumerate(short):
            if uses[name] > 1:
                counts[index] += 1


def combinations(graph: str, settings: Sequence[str], devices: int | None = None) -> list[Combination]:
    """Return the runs of a sweep, each checked.

    Args:
        graph: a path, or the name of a shipped graph.
        settings: ``key=value``. A list is swept where the graph takes no list there; where it takes one, as
            ``prompts.files``, a list of lists is.
        devices: of each run, as ``rlgraph check`` takes them.

    Raises:
        GraphError: nothing is swept, or a combination is not a graph.
    """
    swept = _swept(graph, settings)
    if not swept:
        _check(graph, [settings], devices)
        law = "nothing is swept: no setting has several values"
        raise fail("no-sweep", law, None, remedy="as `rlgraph sweep GRAPH 'seed=[0,1,2]'`")
    fixed = tuple(text for text in settings if text not in swept)
    names = [name for name, _ in swept.values()]
    options = [values for _, values in swept.values()]
    runs = []
    for values in itertools.product(*options):
        runs.append(Combination(dict(zip(names, values, strict=True)), fixed))
    _check(graph, [run.overrides for run in runs], devices)
    return runs


def _swept(graph: str, settings: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return the settings with lists that are deeper than the graph takes: setting -> name and its values."""
    lists: dict[str, Tree] = {}
    single = []  # the settings of one run
    for text in settings:
        name, tree = setting(text)
        if isinstance(tree.value, list) and tree.value:
            lists[text] = tree
            single.append(f"{name}={flow(tree.value[0])}")
        else:
            single.append(text)
    try:
        composed = as_written(graph, single)
    except GraphError as error:
        if error.valid_tree is None:
            raise
        composed = error.valid_tree
    swept = {}
    for text, tree in lists.items():
        name, _ = setting(text)
        if _list_depth(tree) > list_depth(composed, name):
            swept[text] = name, [flow(value) for value in tree.value]
    return swept


def _list_depth(tree: Tree) -> int:
    """Return how many lists stand in each other in a value."""
    if not isinstance(tree.value, list):
        return 0
    return 1 + max((_list_depth(item) for item in tree.value), default=0)


def _check(graph: str, runs: Iterable[Sequence[str]], devices: int | None) -> None:
    """Compile every run of a sweep.

    Raises:
        GraphError: with the problems of all of them, each law once.
    """
    problems: dict[str, Problem] = {}
    for overrides in runs:
        try:
            compile_graph(graph, overrides, devices or 0)
        except GraphError as error:
            for problem in error.problems:
                problems.setdefault(problem.law, problem)
    if problems:
        raise GraphError(problems.values())
