"""Warnings about a run, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlgraph.errors import Problem
from rlgraph.laws.idle_settings import idle_settings
from rlgraph.laws.sampling import changed_sampling
from rlgraph.laws.settings import (
    best_of_one,
    changing_evaluations,
    long_intervals,
    unread_attributes,
)
from rlgraph.laws.training import (
    blind_rewards,
    dropped_nodes,
    idle_kl,
    rising_rates,
    stale_clips,
    untrained_models,
)
from rlgraph.laws.views import RunView

RUN_WARNINGS: tuple[Callable[[RunView], Iterator[Problem]], ...] = (
    dropped_nodes,
    untrained_models,
    blind_rewards,
    changed_sampling,
    stale_clips,
    rising_rates,
    idle_kl,
    long_intervals,
    best_of_one,
    changing_evaluations,
)
# looked for behind those of each phase
SETTING_WARNINGS: tuple[Callable[[RunView], Iterator[Problem]], ...] = (unread_attributes, idle_settings)
