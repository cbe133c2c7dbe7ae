"""Which runs a sweep has: a list where the graph takes one value is swept, each value with all others."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.frontend.compose import setting
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
        parts = map("=".join, zip(shortened(self.values), self.values.values(), strict=True))
        return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))[:MOST].strip("_.")


def shortened(names: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Return the last word of each name, or as many as tell it from the others.

    Example:
        >>> shortened(["update_policy.loss.clip", "rollout.n", "judge.n"])
        ['clip', 'rollout.n', 'judge.n']
    """
    words = {name: name.split(".") for name in names}
    lengths = dict.fromkeys(names, 1)
    while len({*(short := [".".join(words[n][-lengths[n] :]) for n in names])}) < len(short):
        for name, said in zip(names, short, strict=True):
            lengths[name] += short.count(said) > 1
    return short


def combinations(graph: str, settings: Sequence[str], devices: int | None = None) -> list[Combination]:
    """Return the runs of a sweep, each checked.

    Args:
        graph: a path, or the name of a shipped graph.
        settings: ``key=value``. A list is swept where the graph takes no list there; where it takes one, as
            ``prompts.files``, a list of lists is.
        devices: of each run, as ``rlgraph check`` takes them.

    Raises:
        GraphError: nothing is swept, or a combination is no graph.
    """
    named = {text: setting(text) for text in settings}
    lists = {text: (name, tree.value) for text, (name, tree) in named.items() if isinstance(tree.value, list)}
    first = {text: f"{name}={flow(values[0])}" for text, (name, values) in lists.items() if values}
    usual = _problems(graph, [first.get(text, text) for text in settings], devices)
    swept = {}
    for text in first:  # what is wrong with a list, and not with its first value, says that it is swept
        wrong = _problems(graph, [t if t == text else first.get(t, t) for t in settings], devices)
        if {problem.law for problem in wrong} - {problem.law for problem in usual}:
            swept[text] = lists[text]
    if not swept and (wrong := _problems(graph, settings, devices)):
        raise GraphError(wrong)
    if not swept:
        law = "nothing is swept: no setting has several values"
        raise fail("no-sweep", law, None, remedy="as `rlgraph sweep GRAPH 'seed=[0,1,2]'`")
    fixed = tuple(text for text in settings if text not in swept)
    names = [name for name, _ in swept.values()]
    chosen = itertools.product(*([flow(value) for value in values] for _, values in swept.values()))
    found = [Combination(dict(zip(names, values, strict=True)), fixed) for values in chosen]
    problems = [problem for one in found for problem in _problems(graph, one.overrides, devices)]
    if problems:
        raise GraphError({problem.law: problem for problem in reversed(problems)}.values())
    return found


def _problems(graph: str, settings: Sequence[str], devices: int | None) -> Sequence[Problem]:
    try:
        compile_graph(graph, settings, devices or 0)
    except GraphError as error:
        return error.problems
    return ()
