"""Terms: the losses that one optimizer step adds up, each with its own rows, mask, weight and denominators.

update_policy   rows of rollout    ppo_clip ─┐
observations    rows of rollout    sft      ─┴─ one pass over these rows ─┐
imitate         rows of examples   sft      ─── a pass of its own        ─┴─> one optimizer step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.engines.metric_sums import MetricSums, over_ranks
from rlgraph.runtime.engines.term import READ, Term


@dataclass(frozen=True)
class SharedPass:
    """Terms that one pass over their rows serves; the columns of several have the prefixes ``0/``, ``1/``."""

    terms: tuple[Term, ...]
    sums: tuple[MetricSums, ...]  # of each term

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return what the names of each term's own columns begin with."""
        return ("",) if len(self.terms) == 1 else tuple(f"{index}/" for index in range(len(self.terms)))

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
        """Return what the pass reads, where it is to score, and the columns of each term."""
        first_columns = self.terms[0].columns
        if len(self.terms) == 1:
            return dict(first_columns)
        masks = [term.columns["loss_mask"] for term in self.terms]
        anywhere = torch.stack([mask.values for mask in masks]).any(0)
        term_columns = {
            prefix + name: column
            for prefix, term in zip(self.prefixes, self.terms, strict=True)
            for name, column in term.columns.items()
            if name not in READ
        }
        return {
            **{n: first_columns[n] for n in READ if n in first_columns},
            "loss_mask": masks[0].like(anywhere),
            **term_columns,
        }

    def own(self, batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return a term's columns of a micro-batch, what was scored among them: 0 outside its loss mask."""
        if not prefix:
            return dict(batch)
        term_columns = {n.removeprefix(prefix): column for n, column in batch.items() if n.startswith(prefix)}
        mask = term_columns["loss_mask"].values
        scored = {n: batch[n] for n in ("logprobs", "entropy", "new_values") if n in batch}
        masked = {n: column.like(torch.where(mask, column.values, 0)) for n, column in scored.items()}
        return {"tokens": batch["tokens"], **term_columns, **masked}


def passes(
    terms: Mapping[str, Term], sums: Mapping[str, MetricSums], group: dist.ProcessGroup
) -> list[SharedPass]:
    """Return the passes that some terms, by their names, take: as few as their rows allow. A collective."""
    together: list[list[str]] = []
    for name, term in terms.items():
        reads_alike = [term.reads_as(terms[names[0]]) for names in together]
        agreed = over_ranks(torch.tensor(reads_alike), group).bool().all(0).tolist() if reads_alike else []
        if True in agreed:
            together[agreed.index(True)].append(name)
        else:
            together.append([name])
    grouped = ([(terms[name], sums[name]) for name in names] for names in together)
    return [SharedPass(*zip(*pairs, strict=True)) for pairs in grouped]
