"""How fast are estimators and losses on ragged columns beside the same formulas on padded ones?

    python benchmarks/estimators.py [--rows 4096] [--longest 4096] [--mean 1000] [--repeats 3] [--threads 2]

Both get the same rows, of spread lengths (exponential, cut at the longest), and must agree. The padded
versions (``padded.py``) are the formulas written down for ``[rows, longest]`` tensors and a mask, with groups
collected row by row: what most training loops do. Losses are timed with their mean over tokens and their
gradient. Columns are made before the clock starts; runs alternate; the least of the repeats counts.

Covered: one process on the CPU. Not covered: CUDA; what ragged columns save where they are moved.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import padded
import torch

from rlgraph.nodes.advantage.gae import gae, reinforce_pp
from rlgraph.nodes.advantage.group import gdpo, grpo, grpo_passk, opo, reinforce_pp_baseline, rloo
from rlgraph.nodes.loss.covariance import top
from rlgraph.nodes.loss.divergence import dppo_kl, dppo_tv
from rlgraph.nodes.loss.policy import aggregate, cispo, ppo_clip, sapo
from rlgraph.nodes.loss.sequence import geo_mean, gspo
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, Totals

SAMPLES = 8  # a prompt
SHARE = 2e-4  # of tokens with the largest covariance
TARGET = 2.0
TOLERANCE = 1e-3  # of the largest number: float32 sums over millions of tokens
LOSSES = (ppo_clip, cispo, sapo, gspo, geo_mean, dppo_tv, dppo_kl)
Column = Ragged | torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The same columns twice: as ``Ragged``, and padded to ``[rows, longest]``."""

    ragged: dict[str, Ragged]
    padded: dict[str, torch.Tensor]
    rewards: torch.Tensor  # [rows]
    others: torch.Tensor  # [rows]: a second reward
    group: torch.Tensor  # int64 [rows]
    totals: Totals


@dataclass(frozen=True)
class Case:
    """One formula twice; both give a column."""

    name: str
    ours: Callable[[], Ragged]
    theirs: Callable[[], torch.Tensor]


def make(rows: int, longest: int, mean: float) -> Batch:
    """Rows whose first eighth is a prompt, which the loss mask leaves out; log-probs moved a little."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.empty(rows).exponential_(1 / mean, generator=draw).long().clamp(8, longest)
    lengths[0] = longest  # padding goes by the longest row
    frame = Ragged(torch.zeros(int(lengths.sum())), offsets_of(lengths))
    place = torch.arange(len(frame.values)) - frame.spread(frame.offsets[:-1]).values
    mask = frame.like(place >= frame.spread(lengths // 8).values)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(len(frame.values), generator=draw) * scale

    old = -noise(0.7).abs() * mask.values
    group = torch.arange(rows) // SAMPLES
    rewards, others = torch.rand(rows, generator=draw), torch.rand(rows, generator=draw)
    columns = {"old": old, "now": (old + noise(0.2)).clamp(max=-1e-3) * mask.values}
    columns |= {"values": noise(0.5) * mask.values, "rewards": noise(0.1) * mask.values}
    ragged = {name: frame.like(values) for name, values in columns.items()}
    ragged |= {"mask": mask, "advantages": grpo(rewards, group, mask)}
    totals = Totals(tokens=int(mask.values.sum()), sequences=rows)
    return Batch(ragged, {n: column.padded() for n, column in ragged.items()}, rewards, others, group, totals)


def token_cases(batch: Batch) -> Iterator[Case]:
    """Estimators from rewards a token."""
    ours, theirs = batch.ragged, batch.padded
    nothing = torch.zeros_like(theirs["values"])
    yield Case(
        "gae",
        lambda: gae(ours["rewards"], ours["values"], ours["mask"]).advantages,
        lambda: padded.gae(theirs["rewards"], theirs["values"], theirs["mask"], 0.95),
    )
    yield Case(
        "reinforce_pp",
        lambda: reinforce_pp(ours["rewards"], ours["mask"]),
        lambda: padded.gae(theirs["rewards"], nothing, theirs["mask"], 1.0),
    )


def group_cases(batch: Batch) -> Iterator[Case]:
    """Estimators from a reward a sample: over the loss mask, some whitened there."""
    scores, group, mask = batch.rewards, batch.group, batch.padded["mask"]

    def spread(per_row: torch.Tensor) -> torch.Tensor:
        return per_row[:, None] * mask

    def both() -> torch.Tensor:
        return padded.grpo(scores, group) + padded.grpo(batch.others, group)

    def ours(estimate: Callable[..., Ragged]) -> Callable[[], Ragged]:
        return lambda: estimate(scores, group, batch.ragged["mask"])

    yield Case("grpo", ours(grpo), lambda: spread(padded.grpo(scores, group)))
    yield Case("rloo", ours(rloo), lambda: spread(padded.rloo(scores, group)))
    yield Case("opo", ours(opo), lambda: spread(padded.opo(scores, group, mask)))
    yield Case("grpo_passk", ours(grpo_passk), lambda: spread(padded.grpo_passk(scores, group)))
    yield Case(
        "reinforce_pp_baseline",
        ours(reinforce_pp_baseline),
        lambda: padded.whitened(spread(padded.centred(scores, group)), mask),
    )
    yield Case(
        "gdpo",
        lambda: gdpo(scores, batch.others, None, None, group, batch.ragged["mask"]),
        lambda: padded.whitened(spread(both()), mask),
    )


def selection_case(batch: Batch) -> Case:
    """The tokens that KL-Cov holds back."""
    rows = range(len(batch.rewards))
    names = ("old", "advantages", "mask")
    return Case(
        "covariance.top",
        lambda: top(
            Context("covariance", 0, 0, rows, len(rows)), *(batch.ragged[n] for n in names), share=SHARE
        ),
        lambda: padded.top(*(batch.padded[n] for n in names), SHARE),
    )


def loss_case(loss: Callable[..., Ragged], batch: Batch) -> Case:
    """A loss's gradient by the log-probs of now, with its mean over the tokens of the batch."""
    now, then = (columns["now"] for columns in (batch.ragged, batch.padded))
    extra = [batch.ragged["mask"]] if loss in (gspo, geo_mean) else []
    plain = getattr(padded, loss.__name__)

    def ours() -> Ragged:
        values = now.values.detach().requires_grad_()
        made = loss(now.like(values), batch.ragged["old"], batch.ragged["advantages"], *extra)
        total = aggregate(made, batch.ragged["mask"], batch.totals, "token-mean")
        return now.like(torch.autograd.grad(total, values)[0] * batch.totals.tokens)

    def theirs() -> torch.Tensor:
        values, mask = then.detach().requires_grad_(), batch.padded["mask"]
        made = plain(values, batch.padded["old"], batch.padded["advantages"], mask)
        total = (made * mask).sum() / mask.sum()
        return torch.autograd.grad(total, values)[0] * batch.totals.tokens

    return Case(loss.__name__, ours, theirs)


def seconds(run: Callable[[], Column]) -> tuple[float, Column]:
    start = time.perf_counter()
    made = run()
    return time.perf_counter() - start, made


def compare(case: Case, repeats: int) -> tuple[float, float]:
    """Least seconds of both, which must agree."""
    ours, theirs = [], []
    for _ in range(repeats):
        spent, column = seconds(case.ours)
        ours.append(spent)
        spent, plain = seconds(case.theirs)
        theirs.append(spent)
    assert isinstance(column, Ragged)
    found, wanted = column.values.float(), plain[column.mask()].float()
    apart = (found - wanted).abs() > TOLERANCE * wanted.abs().max()
    # where float32 sums fall on two sides of a bound or of the last place, a few tokens may differ
    assert apart.float().mean() < 1e-5, f"{case.name}: {int(apart.sum())} tokens differ"
    return min(ours), min(theirs)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", default=4096)
@click.option("--longest", default=4096)
@click.option("--mean", default=1000.0)
@click.option("--repeats", default=3)
@click.option("--threads", default=2)
def main(rows: int, longest: int, mean: float, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    batch = make(rows, longest, mean)
    tokens, cells = len(batch.ragged["mask"].values), batch.padded["mask"].numel()
    print(f"torch {torch.__version__}, python {platform.python_version()}, {threads} thread(s)")
    print(
        f"{rows} rows, {tokens:,} tokens, {cells:,} with padding ({cells / tokens:.1f}x), best of {repeats}"
    )
    print(f"  {'':<22} {'ragged':>8} {'padded':>9}   ratio (target {TARGET})")
    cases = [*token_cases(batch), *group_cases(batch), selection_case(batch)]
    for case in [*cases, *(loss_case(loss, batch) for loss in LOSSES)]:
        ours, theirs = compare(case, repeats)
        print(f"  {case.name:<22} {ours:>6.3f} s {theirs:>7.3f} s   {theirs / ours:.2f}", flush=True)


if __name__ == "__main__":
    main()
