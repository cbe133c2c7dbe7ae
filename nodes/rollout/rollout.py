"""Sampling responses from a serve engine; a row of ``tokens`` is prompt and response together."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, NonNegativeFloat

from rlgraph.errors import RunError
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, Generation, Request, Sampling, ServeEngine, op
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
from rlgraph.ops.declare import Role


class Rollout(NamedTuple):
    """The columns that ``rollout`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]
    routing: int64[samples, tokens, layers, k] | None = None


SAMPLING: dict[Role, str] = {
    "response_limit": "max_new_tokens",
    "total_limit": "max_total_tokens",
    "temperature": "temperature",
    "nucleus": "top_p",
}
CUT = dict.fromkeys(("top_p", "top_k", "min_p"), "temperature")  # the most likely token is left by any cut
REPEATED, REPETITION = 10_000, 10  # characters at the end that are looked at, and how much shorter they get
StopText = Annotated[str, Field(min_length=1)]
StopId = Annotated[int, Field(ge=0)]
Repetition = Annotated[float, Field(gt=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


@op(
    makes="samples",
    times="n",
    rows="each",
    when={**CUT, "routing": "routing"},
    stores={"routing": "int16"},
    assumes=("routed", "grammar"),
    streams="rollout.partial",
    roles={**SAMPLING, "routing": "routing"},
)
def rollout(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    n: Annotated[int, Field(ge=1)] = 1,
    max_new_tokens: Annotated[int, Field(ge=1)],
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None,
    temperature: NonNegativeFloat = 1.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    top_k: Annotated[int, Field(ge=0)] = 0,
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0,
    stop: list[StopText] = [],  # noqa: B006 - never changed
    stop_token_ids: list[StopId] = [],  # noqa: B006 - likewise
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Penalty = 0.0,
    frequency_penalty: Penalty = 0.0,
    min_new_tokens: Annotated[int, Field(ge=0)] = 0,
    regex: str | None = None,
    json_schema: dict[str, Any] | None = None,
    routing: bool = False,
) -> Rollout:
    """Sample ``n`` responses to each prompt: token t ~ softmax(logits / temperature), cut by top_k and top_p.

    Sample k of prompt p is row p * n + k; ``group`` is p. Its random numbers depend on the run's seed, the
    iteration, the node and that row, not on which engine draws it or beside what. ``loss_mask`` is true on
    the response, its end token included. ``rollout_logprobs``, in nats, are the serve engine's own, before
    top_k, top_p and min_p cut, but with penalties, ``min_new_tokens`` and grammars, of which log-probs that a
    train engine computes know nothing; 0 on the prompt. ``routing``, of a mixture of experts, are those that
    each token was routed to in each layer that has them, by their numbers; -1 where a token was not routed,
    as the last. Records ``rollout/length`` (response tokens), ``rollout/prompt_length`` (prompt tokens),
    ``rollout/truncated`` and ``rollout/repetitive`` (fractions) and ``tokens/generated`` (a total).
    Nucleus sampling: arXiv 1904.09751.

    Attributes:
        n: responses per prompt, at least 1.
        max_new_tokens: the most tokens that a response may have; one that reaches it is ``truncated``.
        max_total_tokens: the most tokens of a prompt and its response together; null: no bound of its own. A
            response may then have as many as its prompt leaves of it, and no more than max_new_tokens.
        temperature: what the logits are divided by; 0 takes the most likely token.
        top_p: the smallest set of tokens with this probability is kept; 1 keeps all.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        min_p: tokens less likely than this share of the most likely one are dropped; 0 keeps all.
        stop: texts that end a response; the one that does is part of it, with the whole of its last token.
        stop_token_ids: tokens that end a response, by their ids; the one that does is part of it.
        repetition_penalty: by how much tokens that the response has become less likely; 1: not at all.
        presence_penalty: what is taken off the logits of such tokens.
        frequency_penalty: what is taken off them for each time that they came.
        min_new_tokens: how many tokens a response has at least before its end token.
        regex: a regular expression that a response is one of (sglang).
        json_schema: a JSON schema that a response is an instance of (sglang).
        routing: whether to write the experts that were chosen, for log-probs and updates to replay.

    Example:
        rollout: {op: rollout, model: policy, n: 8, max_new_tokens: 1024, temperature: 1.0}
    """
    rows = [row * n + k for row in ctx.rows for k in range(n)]
    seeds = [seed(ctx.seed, ctx.iteration, ctx.node, row) for row in rows]
    limits = response_limits(ctx, prompt.tolist(), max_new_tokens, max_total_tokens)
    requests = [
        Request(ids, seeds[i * n : i * n + n], max_new_tokens=limit)
        for i, (ids, limit) in enumerate(zip(prompt.tolist(), limits, strict=True))
    ]
    sampling = Sampling(
        *(max_new_tokens, temperature, top_p, top_k, min_p, stop, stop_token_ids),
        *(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens),
        *(regex, json_schema, routing),
    )
    answers = model.generate(requests, sampling)
    pairs = [(request.prompt, g) for request, many in zip(requests, answers, strict=True) for g in many]
    assert len(pairs) == len(rows), "the engine owes a generation a seed"
    ctx.record("tokens/generated", [len(g.tokens) for _, g in pairs], kind="sum", over="tokens")
    columns = assemble(model.tokenizer, pairs, [row // n for row in rows])
    record_lengths(ctx, pairs, columns.responses)
    return columns


def response_limits(
    ctx: Context, prompts: Sequence[Sequence[int]], most: int, total: int | None
) -> list[int]:
    """Return the most tokens of each prompt's response, where it and its prompt have no more than ``total``.

    Raises:
        RunError: a prompt leaves no token for a response.
    """
    if total is None:
        return [most] * len(prompts)
    for row, ids in enumerate(prompts):
        if len(ids) >= total:
            law = f"`{ctx.node}`: prompt {ctx.number(row)} of the batch has {len(ids):,} tokens: within "
            law += f"max_total_tokens ({total:,}) there is no room for a response"
            remedy = f"let data.prompts drop such questions, by max_prompt_tokens: {total - 1}, or raise it"
            raise RunError(f"{law}\n  {remedy}")
    return [min(most, total - len(ids)) for ids in prompts]


def seed(run: int, iteration: int, node: str, row: int) -> int:
    """Return a sample's seed: 63 bits that depend on all four, the same on any machine."""
    digest = hashlib.blake2b(f"{run}/{iteration}/{node}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def assemble(
    tokenizer: Any, pairs: Sequence[tuple[Sequence[int], Generation]], group: Sequence[int]
) -> Rollout:
    """Return columns from (prompt ids, generation) pairs, one per sample."""
    return Rollout(
        tokens=Ragged.of([[*ids, *g.tokens] for ids, g in pairs], torch.int64),
        loss_mask=Ragged.of([[False] * len(ids) + [True] * len(g.tokens) for ids, g in pairs], torch.bool),
        rollout_logprobs=Ragged.of([[0.0] * len(ids) + list(g.logprobs) for ids, g in pairs], torch.float32),
        responses=[tokenizer.decode(list(g.tokens), skip_special_tokens=True) for _, g in pairs],
        group=torch.tensor(group, dtype=torch.int64),
        truncated=torch.tensor([g.finish == "length" for _, g in pairs], dtype=torch.bool),
        routing=_routing(pairs),
    )


def _routing(pairs: Sequence[tuple[Sequence[int], Generation]]) -> Ragged | None:
    """Return the experts that each token was routed to; None where none were told."""
    told = [generation.routing for _, generation in pairs if generation.routing is not None]
    if not told:
        return None
    lengths = torch.tensor([len(ids) + len(g.tokens) for ids, g in pairs], dtype=torch.int64)
    return Ragged(torch.cat(told), offsets_of(lengths))


def record_lengths(
    ctx: Context, pairs: Sequence[tuple[Sequence[int], Generation]], responses: Sequence[str]
) -> None:
    """Record how long responses and prompts are, and which fractions are cut off or repeat themselves."""
    lengths = [len(generation.tokens) for _, generation in pairs]
    ctx.record("rollout/length", lengths)
    ctx.record("rollout/length_", lengths, kind=("std", "min", "max", "p10", "p50", "p90", "p99"))
    ctx.record("rollout/prompt_length", [len(ids) for ids, _ in pairs])
    ctx.record("rollout/truncated", [g.finish == "length" for _, g in pairs], kind="share")
    ctx.record("rollout/repetitive", [*map(repeats, responses)], kind="share")


def repeats(text: str) -> bool:
    """Return whether a text repeats itself: zlib makes a tenth of its end or less. Prose comes to a half.

    Example:
        >>> repeats("It is 4. " * 80), repeats("It is 4."), repeats("".join(map(str, range(999))))
        (True, False, False)
    """
    end = text[-REPEATED:].encode(errors="replace")
    return len(end) >= REPETITION * len(zlib.compress(end))
