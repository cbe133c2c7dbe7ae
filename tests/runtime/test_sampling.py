"""Seeded sampling: the published generator, and the distribution that it draws from."""

from __future__ import annotations

import pytest
import torch

from rlgraph.ops import Sampling
from rlgraph.runtime.engines.transformers.sampling import draw, streams, uniform


def test_uniform_numbers_are_splitmix64() -> None:
    def reference(state: int) -> int:
        mask = 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    seeds, weyl = [0, 1, 12345, 2**63, 2**64 - 1, -1], 0x9E3779B97F4A7C15
    got = uniform(streams(seeds), torch.arange(6) * 1000).tolist()
    streams_ = [reference((seed + weyl) % 2**64) for seed in seeds]
    expected = [reference((s + (1000 * i + 1) * weyl) % 2**64) >> 11 for i, s in enumerate(streams_)]
    assert got == [number / 2**53 for number in expected]
    assert got[4] != got[5]


def test_first_outputs_of_splitmix64_with_seed_zero() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    # The published sequence of SplitMix64 from state 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniform(zeros, torch.arange(3)).tolist() == [(number >> 11) / 2**53 for number in published]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(1, top_k=2), [0.4, 0.3, 0, 0, 0]),
        (Sampling(1, top_p=0.6), [0.4, 0.3, 0, 0, 0]),
        (Sampling(1, top_p=0.71), [0.4, 0.3, 0.15, 0, 0]),
        (Sampling(1, top_k=3, top_p=0.8), [0.4, 0.3, 0, 0, 0]),
        (Sampling(1, temperature=0.5), [0.16, 0.09, 0.0225, 0.01, 0.0025]),
    ],
)
def test_frequencies_are_the_distribution(sampling: Sampling, kept: list[float]) -> None:
    order, count = torch.tensor([3, 0, 4, 1, 2]), 20_000
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()[order].expand(count, 5)
    expected = torch.tensor(kept)[order]
    expected /= expected.sum()
    for numbers in (
        uniform(streams(range(count)), torch.zeros(count, dtype=torch.int64)),
        uniform(streams([5] * count), torch.arange(count)),
    ):
        tokens, logprobs = draw(logits, numbers, sampling)
        observed = tokens.bincount(minlength=5)
        assert not observed[expected == 0].any()
        possible = expected > 0
        square = (observed - count * expected)[possible] ** 2 / (count * expected[possible])
        assert square.sum() < 18.5  # 4 degrees of freedom: 1 in 1,000; the seeds are fixed
        whole = (logits[0] / sampling.temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs, whole[tokens])
