"""Terms: the losses that one optimizer step adds up, each with its own rows, mask, weight and denominators.

update_policy   rows of rollout    ppo_clip ─┐
observations    rows of rollout    sft      ─┴─ one pass over these rows ─┐
imitate         rows of examples   sft      ─── a pass of its own        ─┴─> one optimizer step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.engines.metric_sums import MetricSums, over_ranks
from rlgraph.runtime.engines.term import READ, Term


@dataclass(frozen=True)
class SharedPass:
    """One pass over rows that several terms read; their columns have the prefixes ``0/``, ``1/``, ..."""

    terms: tuple[Term, ...]
    sums: tuple[MetricSums, ...]  # of each term

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return the prefix of each term's columns: "" of a single one."""
        if len(self.terms) == 1:
            return ("",)
        return tuple(f"{index}/" for index in range(len(self.terms)))

    @property
    def merged(self) -> dict[str, bool]:
        """Return for each prefix whether its rows of one number are one sequence."""
        return {prefix: term.merged for prefix, term in zip(self.prefixes, self.terms, strict=True)}

    @property
    def temperature(self) -> float:
        return self.terms[0].temperature

    @property
    def entropy(self) -> bool:
        return any(term.entropy for term in self.terms)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the columns that the model reads, which tokens it scores, and the columns of each term."""
        shared_columns = self.terms[0].columns
        if len(self.terms) == 1:
            return dict(shared_columns)
        columns = {name: shared_columns[name] for name in READ if name in shared_columns}
        masks = [term.columns["loss_mask"] for term in self.terms]
        scored_by_any = torch.stack([mask.values for mask in masks]).any(0)
        columns["loss_mask"] = masks[0].like(scored_by_any)
        for prefix, term in zip(self.prefixes, self.terms, strict=True):
            for name, column in term.columns.items():
                if name not in READ:
                    columns[prefix + name] = column
        return columns

    def columns_of_term(self, batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return a term's columns of a micro-batch, with the scores: 0 outside the term's loss mask."""
        if not prefix:
            return dict(batch)
        columns = {"tokens": batch["tokens"]}
        for name, column in batch.items():
            if name.startswith(prefix):
                columns[name.removeprefix(prefix)] = column
        mask = columns["loss_mask"].values
        for name in ("logprobs", "entropy", "new_values"):
            if name in batch:
                scores = batch[name]
                columns[name] = scores.like(torch.where(mask, scores.values, 0))
        return columns


def passes(
    terms: Mapping[str, Term], sums: Mapping[str, MetricSums], group: dist.ProcessGroup
) -> list[SharedPass]:
    """Return the passes that terms take, as few as their rows allow. A collective over ``group``."""
    names_of_passes: list[list[str]] = []
    for name, term in terms.items():
        index = _common_pass(term, [terms[names[0]] for names in names_of_passes], group)
        if index is None:
            names_of_passes.append([name])
        else:
            names_of_passes[index].append(name)
    shared_passes = []
    for names in names_of_passes:
        shared_passes.append(
            SharedPass(
                terms=tuple(terms[name] for name in names),
                sums=tuple(sums[name] for name in names),
            )
        )
    return shared_passes


def _common_pass(term: Term, others: Sequence[Term], group: dist.ProcessGroup) -> int | None:
    """Return the first of the other terms that reads the same rows, on every rank; None if there is none."""
    if not others:
        return None
    reads_same = torch.tensor([term.reads_as(other) for other in others])
    on_every_rank = over_ranks(reads_same, group).bool().all(0).tolist()
    return on_every_rank.index(True) if True in on_every_rank else None
