"""Log-probs, entropies and values of a micro-batch's scored tokens.

Shapes: ``[scored]`` is one entry for each token that wants a score; ``[scored, vocabulary]`` its logits.
"""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from rlgraph.runtime.fsdp.batching import MicroBatch

Entropy = Literal["none", "detached", "differentiable"]

CHUNK = 2**26  # numbers of one float32 copy of the logits: 256 MiB


def projects_positions(model: torch.nn.Module) -> bool:
    """Whether the model's forward takes ``logits_to_keep``: given a mask, it projects no other position.

    transformers 5.23 takes masks; a release that takes only columns fails on one.
    """
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def forward(model: torch.nn.Module, batch: MicroBatch, projects: bool) -> torch.Tensor:
    """The model's own output where the next token is scored: ``[scored, vocabulary]``, or ``[scored, 1]``."""
    options = {"logits_to_keep": batch.keep} if projects else {}
    logits: torch.Tensor = model(input_ids=batch.input_ids, use_cache=False, **options).logits
    return logits if projects else logits[batch.keep]


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
