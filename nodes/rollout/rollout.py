"""Sampling responses from a serve engine; a row of ``tokens`` is prompt and response together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlgraph.nodes.rollout.response_metrics import record_responses
from rlgraph.nodes.rollout.sampling import (
    CUTS_WITH_TEMPERATURE,
    SAMPLING_ROLES,
    Grammar,
    ResponseLimits,
    SamplingAttributes,
)
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, Generation, Request, ServeEngine, op
from rlgraph.ops.column_types import (
    boolean,
    float32,
    int64,
    k,
    layers,
    prompt_tokens,
    prompts,
    samples,
    text,
    tokens,
)

PromptAndSample = tuple[Sequence[int], Generation]  # the prompt's ids, and what was drawn behind them


class Rollout(NamedTuple):
    """The columns that ``rollout`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]
    routing: int64[samples, tokens, layers, k] | None = None


@op(
    makes="samples",
    times="n",
    rows="each",
    when={**CUTS_WITH_TEMPERATURE, "routing": "routing"},
    stores={"routing": "int16"},
    assumes=("routed", "grammar"),
    streams="rollout.partial",
    roles={**SAMPLING_ROLES, "routing": "routing"},
)
def rollout(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    limits: ResponseLimits,
    sampling: SamplingAttributes,
    grammar: Grammar,
    routing: bool = False,
) -> Rollout:
    """Sample ``n`` responses to each prompt: token t ~ softmax(logits / temperature), cut by top_k and top_p.

    Sample k of prompt p is row p * n + k; ``group`` is p. Its random numbers depend on the run's seed, the
    iteration, the node and that row, but not on which engine draws it or on what else is in its batch.
    ``loss_mask`` is true on the response, including its end token. ``rollout_logprobs``, in nats, are those
    of the serve engine before top_k, top_p and min_p are applied, and after penalties, ``min_new_tokens`` and
    grammars, which the log-probs of a train engine don't include; 0 on the prompt. ``routing``, for a mixture
    of experts, holds the indices of the experts to which each token was routed in each layer that has
    experts; -1 for a token that was not routed, such as the last. Records ``rollout/length`` (response
    tokens), ``rollout/prompt_length`` (prompt tokens), ``rollout/truncated`` and ``rollout/repetitive``
    (fractions) and ``tokens/generated`` (a total). Nucleus sampling: arXiv 1904.09751.

    Attributes:
        routing: whether to write which experts were chosen, so that log-probs and updates can replay the
            choice.

    Example:
        rollout: {op: rollout, model: policy, n: 8, max_new_tokens: 1024, temperature: 1.0}
    """
    prompt_ids = prompt.tolist()
    requests = []
    for row, ids, limit in zip(ctx.rows, prompt_ids, limits.of_prompts(ctx, prompt_ids), strict=True):
        seeds = sample_seeds(ctx, row, limits.n)
        requests.append(Request(ids, seeds, max_new_tokens=limit))
    settings = sampling.settings(limits.max_new_tokens, grammar, routing)
    generations = model.generate(requests, settings)
    prompts_and_samples: list[PromptAndSample] = []
    group = []
    for row, request, samples_of_prompt in zip(ctx.rows, requests, generations, strict=True):
        assert len(samples_of_prompt) == limits.n, "the engine owes a generation per seed"
        prompts_and_samples += [(request.prompt, sample) for sample in samples_of_prompt]
        group += [row] * limits.n
    generated = [len(sample.tokens) for _, sample in prompts_and_samples]
    ctx.record("tokens/generated", generated, kind="sum", over="tokens")
    columns = assemble(model.tokenizer, prompts_and_samples, group)
    record_drawn(ctx, prompts_and_samples, columns.responses)
    return columns


def sample_seeds(ctx: Context, row: int, n: int) -> list[int]:
    """Return the seeds of the ``n`` samples of the prompt that is ``row`` of the whole batch."""
    return [seed(ctx.seed, ctx.iteration, ctx.node, int(row) * n + k) for k in range(n)]


def seed(run: int, iteration: int, node: str, row: int) -> int:
    """Return a sample's seed: 63 bits that depend on all four, the same on any machine."""
    digest = hashlib.blake2b(f"{run}/{iteration}/{node}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def assemble(tokenizer: Any, prompts_and_samples: Sequence[PromptAndSample], group: Sequence[int]) -> Rollout:
    """Return columns from prompts and samples, one row per sample; ``group`` numbers their prompts."""
    rows = []
    loss_mask = []
    logprobs = []
    for ids, sample in prompts_and_samples:
        rows.append([*ids, *sample.tokens])
        loss_mask.append([False] * len(ids) + [True] * len(sample.tokens))
        logprobs.append([0.0] * len(ids) + list(sample.logprobs))
    samples = [sample for _, sample in prompts_and_samples]
    return Rollout(
        tokens=Ragged.of(rows, torch.int64),
        loss_mask=Ragged.of(loss_mask, torch.bool),
        rollout_logprobs=Ragged.of(logprobs, torch.float32),
        responses=[tokenizer.decode(list(s.tokens), skip_special_tokens=True) for s in samples],
        group=torch.tensor(group, dtype=torch.int64),
        truncated=torch.tensor([s.finish == "length" for s in samples], dtype=torch.bool),
        routing=_routing(prompts_and_samples),
    )


def _routing(prompts_and_samples: Sequence[PromptAndSample]) -> Ragged | None:
    """Return the experts that each token was routed to; None where no engine reported any."""
    reported = [sample.routing for _, sample in prompts_and_samples if sample.routing is not None]
    if not reported:
        return None
    lengths = [len(ids) + len(sample.tokens) for ids, sample in prompts_and_samples]
    return Ragged(torch.cat(reported), offsets_of(torch.tensor(lengths, dtype=torch.int64)))


def record_drawn(
    ctx: Context, prompts_and_samples: Sequence[PromptAndSample], responses: Sequence[str]
) -> None:
    """Record the metrics of responses that were sampled at once."""
    record_responses(
        ctx,
        lengths=[len(sample.tokens) for _, sample in prompts_and_samples],
        prompt_lengths=[len(ids) for ids, _ in prompts_and_samples],
        truncated=[sample.finish == "length" for _, sample in prompts_and_samples],
        responses=responses,
    )
