"""Sampling that a seed decides: a sample does not depend on who shares its batch, nor on its row in it.

Randomness is counted, not streamed: the uniform number behind a token is a hash of the sample's seed and of
the token's position, and the token is the inverse of the cumulative distribution at that number. So it is as
far as the distribution is the same: on CUDA the rounding of logits depends on the batch.

Shapes: rows (running samples), vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlgraph.nodes.support.splitmix import WEYL, mix, shift, signed
from rlgraph.ops.interfaces import Sampling


def streams(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return one stream per seed, int64 ``[rows]``; seeds are any integers, taken modulo 2**64."""
    return mix(torch.tensor([signed(seed + WEYL) for seed in seeds], dtype=torch.int64, device=device))


def uniform(stream: Tensor, position: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64 ``[rows]``, for streams and positions int64 ``[rows]``.

    SplitMix64 at counter ``position``.
    """
    return shift(mix(stream + (position + 1) * WEYL), 11).to(torch.float64) * 2.0**-53


def draw(logits: Tensor, numbers: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    Args:
        logits: ``[rows, vocabulary]``.
        numbers: float64 ``[rows]`` in [0, 1), as from ``uniform``.
        sampling: temperature, then the cuts ``min_p`` and ``top_k``, then ``top_p`` of what these left.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probs, float32 ``[rows]``, before any cut; at temperature 1
        where the choice is greedy.
    """
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        probs = logprobs.exp()
        if sampling.min_p:
            probs = probs.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = _cut(probs, sampling.top_k, sampling.top_p)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        # right=True: the first entry above the number, so a token of probability 0 is never chosen. Only NaN
        # finds none; it comes back as a log-prob of NaN.
        tokens = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def penalise(logits: Tensor, drawn: Tensor, sampling: Sampling) -> None:
    """Change logits ``[rows, vocabulary]`` in place by the tokens drawn, int64 ``[rows, most]``, or -1.

    As SGLang 0.5.23 does: what is taken off comes before what divides, and prompts do not count. Presence and
    frequency: OpenAI's API; repetition: CTRL, arXiv 1909.05858, but for the prompt.
    """
    times = torch.zeros_like(logits).scatter_add_(1, drawn.clamp(min=0), (drawn >= 0).to(logits.dtype))
    logits.sub_(times, alpha=sampling.frequency_penalty)
    is_present = times > 0
    logits.sub_(times.copy_(is_present), alpha=sampling.presence_penalty)
    penalty = sampling.repetition_penalty
    if penalty != 1:
        penalised = (logits / penalty).where(logits >= 0, logits * penalty)
        logits.copy_(logits.where(~is_present, penalised))


def _cut(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero what the cuts drop; the result ``[rows, vocabulary]`` need not sum to 1."""
    k = min(top_k or probs.shape[-1], probs.shape[-1])
    if k == probs.shape[-1] and top_p >= 1:
        return probs
    # Tokens keep their places: order by id does not flip when rounding swaps two equal probabilities.
    if k < probs.shape[-1]:
        survives, tokens = probs.topk(k)
    else:
        survives, tokens = probs.sort(-1, descending=True)
    if top_p < 1:
        cumulative = survives.cumsum(-1, dtype=torch.float64) - survives
        survives = survives.where(
            cumulative < top_p * survives.sum(-1, keepdim=True, dtype=torch.float64), 0.0
        )
        survives[:, 0] = probs.gather(-1, tokens[:, :1])[:, 0]
    return torch.zeros_like(probs).scatter(-1, tokens, survives)
