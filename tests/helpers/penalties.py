"""What a plain forward says of a sample that penalties have changed, one token after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch

from rlgraph.ops import Generation, Request, Sampling


def penalised(
    model: torch.nn.Module, request: Request, made: Generation, sampling: Sampling, ends: Collection[int]
) -> list[torch.Tensor]:
    """Return the log-probs before each token, [tokens][vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *made.tokens]])).logits[0].float()
    rows = []
    for place in range(len(made.tokens)):
        row = logits[len(request.prompt) - 1 + place].clone()
        for token, times in Counter(made.tokens[:place]).items():
            row[token] -= sampling.presence_penalty + times * sampling.frequency_penalty
            by = sampling.repetition_penalty
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        if place + request.drawn < sampling.min_new_tokens:
            row[[*ends]] = -torch.inf
        rows.append(torch.log_softmax(row / (sampling.temperature or 1.0), -1))
    return rows


def assert_drawn_so(
    model: torch.nn.Module, request: Request, made: Generation, sampling: Sampling, ends: Collection[int]
) -> None:
    """Check a sample's log-probs and, where it is greedy, its tokens."""
    rows = penalised(model, request, made, sampling, ends)
    own = torch.stack([row[token] for row, token in zip(rows, made.tokens, strict=True)])
    torch.testing.assert_close(own, torch.tensor(made.logprobs), atol=2e-4, rtol=1e-4)
    if sampling.temperature == 0:
        assert [int(row.argmax()) for row in rows] == list(made.tokens)
