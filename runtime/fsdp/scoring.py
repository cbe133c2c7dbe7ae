"""Log-probs, entropies and values of a micro-batch's scored tokens.

Shapes: ``[scored]`` is one entry for each token that wants a score; ``[scored, vocabulary]`` its logits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from rlgraph.runtime.fsdp.batching import MicroBatch

Entropy = Literal["none", "detached", "differentiable"]

CHUNK = 2**26  # numbers of one float32 copy of the logits: 256 MiB


def forward(model: torch.nn.Module, batch: MicroBatch, head: torch.nn.Module | None) -> torch.Tensor:
    """The model's own output where the next token is scored: ``[scored, vocabulary]``, or ``[scored, 1]``.

    Args:
        model: called as a whole, so that what it does behind its head (soft caps, scales) is done.
        batch: ``keep`` marks the positions.
        head: the layer that projects onto the vocabulary, which then sees no other position; None for all.
    """
    if head is None:
        logits: torch.Tensor = model(input_ids=batch.input_ids, use_cache=False).logits
        return logits[batch.keep]
    handle = head.register_forward_pre_hook(lambda _, hidden: (hidden[0][batch.keep],))
    try:
        projected: torch.Tensor = model(input_ids=batch.input_ids, use_cache=False).logits
    finally:
        handle.remove()
    return projected


def token_scores(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: Entropy, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each label, and the entropy of each distribution in nats.

    ``log softmax(logits / temperature)[label]``, in float32 and in chunks; where there are several, a chunk's
    float32 copy is made again in the backward pass rather than kept.

    Args:
        logits: ``[scored, vocabulary]``.
        labels: int64 ``[scored]``.
        temperature: what the logits are divided by.
        entropy: whether to compute it, and whether gradients flow through it.
        chunk: numbers of the logits that are in float32 at once.

    Returns:
        float32 ``[scored]`` each; None for an entropy that was not asked for.
    """
    chunks = list(zip(*(t.split(max(1, chunk // logits.shape[1])) for t in (logits, labels)), strict=True))
    if len(chunks) == 1:
        return _chunk_scores(logits, labels, temperature, entropy)
    scores = [checkpoint(_chunk_scores, *part, temperature, entropy, use_reentrant=False) for part in chunks]
    entropies = [h for _, h in scores if h is not None]
    return torch.cat([logprob for logprob, _ in scores]), torch.cat(entropies) if entropies else None


def _chunk_scores(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_p = torch.log_softmax(scaled, dim=-1)
    chosen = log_p.gather(1, labels[:, None]).squeeze(1)
    if entropy == "none":
        return chosen, None
    log_p = log_p if entropy == "differentiable" else log_p.detach()
    return chosen, -(log_p.exp() * log_p).sum(-1)
