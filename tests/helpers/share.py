"""What every commit tests of something large; ``make nightly`` tests all of it (see docs/contributing.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.syntax import source

# One shipped graph for each way in which plans differ; the others are edits of one of them.
FAMILIES = (
    "ppo",  # a critic
    "grpo",  # groups of samples
    "remax",  # a greedy rollout
    "rm_ppo",  # a reward model
    "sft",  # no rollout
    "demo_sft",  # no rollout but in its evaluation
    "dpo",  # pairs
    "reward_model",  # a value head, trained on pairs
    "kto",  # labels
    "distill",  # a teacher
    "mopd",  # rows by their source
    "rft",  # a filter
    "chord",  # losses that add up
    "decoupled_ppo",  # two pools, generation ahead
    "calculator_tool",  # turns with tools
)
EVERY = 100  # of a hundred examples, how many a profile of Hypothesis tries: tests/conftest.py sets it


def families(names: Iterable[str] = shipped_graphs()) -> list[Any]:
    """Parameters: each graph's name, marked as nightly unless it stands for a family."""
    return rest_nightly(names, lambda name: name in FAMILIES)


def edits_of(family: str) -> list[str]:
    """The shipped graphs that stand behind a family's: edits of it, or edits of such."""
    return [name for name in shipped_graphs() if name not in FAMILIES and family_of(name) == family]


def family_of(name: str) -> str:
    """The nearest of a graph and those that it extends which is a family's."""
    while name not in FAMILIES:
        name = source.read(shipped_graphs()[name]).plain()["extends"]
    return name


def rest_nightly(values: Iterable[Any], by_day: Callable[..., bool]) -> list[Any]:
    """Parameters, marked as nightly where ``by_day`` says no."""
    found = []
    for value in values:
        each = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*each, marks=[] if by_day(*each) else pytest.mark.nightly))
    return found


def examples(number: int, **more: Any) -> settings:
    """Settings of a property that is tried on ``number`` examples: on fewer by day, on more at night."""
    share = settings.default.max_examples / EVERY
    return settings(
        **({"deadline": None, "derandomize": True} | more), max_examples=max(5, round(number * share))
    )
