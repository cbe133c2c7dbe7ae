"""Partial rollouts: sampling that leaves the longest samples for later rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from pydantic import Field, NonNegativeFloat

from rlgraph.nodes.rollout.rollout import (
    CUT,
    SAMPLING,
    Penalty,
    Repetition,
    StopId,
    StopText,
    assemble,
    record_lengths,
    response_limits,
    seed,
)
from rlgraph.nodes.rollout.stop_text import cut_at_text
from rlgraph.nodes.support.lazy import numpy, torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Enough, Generation, Request, Sampling, ServeEngine, op
from rlgraph.ops.column_types import boolean, float32, int64, prompt_tokens, prompts, samples, text, tokens

LEFT = 4  # columns of unfinished samples: token ids, log-probs and versions, and whether each ended


class PartialRollout(NamedTuple):
    """The columns that ``rollout.partial`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]
    token_versions: int64[samples, tokens]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]


@op(makes="samples", times="n", rows="each", leaves=LEFT, when=CUT, roles=SAMPLING)
def partial(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    n: Annotated[int, Field(ge=1)] = 1,
    max_new_tokens: Annotated[int, Field(ge=1)],
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None,
    chunk: Annotated[int, Field(ge=1)] | None = None,
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0,
    stays: bool = False,
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
) -> PartialRollout:
    """Sample as ``rollout`` does, but leave the longest samples for later rounds: partial rollouts.

    For the steps before a filter with ``refill``. A round gives each sample at most ``chunk`` tokens, and
    ends where a share of its groups has, ``enough``: the engine then aborts the others. A group goes on to
    the next step once all its samples have ended; one that has not is taken up in the next round from the
    tokens that it has. So the first groups to end are the first to be used, and once there are enough the
    rest waits for the next iteration, which goes on with newer weights (``refill.keep``), or is given up.
    With ``chunk`` first is by tokens, not by seconds: it depends on nothing but the seed. With ``enough`` it
    is by what a device has: the embedded engine gives the same each time on as many devices, servers what
    they end first.

    With ``stays``, as where generation streams, engines go on with what is unfinished. The embedded one keeps
    keys and values of what it cut until the next round, or new weights: a chunk then costs what its tokens
    cost. Servers have it in flight between rounds too: ``chunk`` and ``enough`` say nothing there, but a
    round ends with the first group, or after a second, and no sample is aborted until new weights come or
    the run gives it up. Any round ends where weights wait for it, or another device's is over.

    Within an iteration a sample is the one that ``rollout`` draws, but for penalties, which count the tokens
    of a round alone, or those since a server was last asked for the sample; grammars, which each round would
    begin anew, it takes none. Outside such a region it runs to the end at once.

    ``token_versions`` is the version of the weights that drew each token, counted in updates from the start
    of the run; -1 on the prompt. All else is as of ``rollout``; ``tokens/generated`` counts the tokens of the
    round, whichever become of them. Partial rollouts: Kimi k1.5, arXiv 2501.12599.

    Attributes:
        n: responses per prompt, at least 1.
        max_new_tokens: the most tokens that a response may have; one that reaches it is ``truncated``.
        max_total_tokens: the most tokens of a prompt and its response together; null: no bound of its own. A
            response may then have as many as its prompt leaves of it, and no more than max_new_tokens.
        chunk: the most tokens that a response gets in a round; null: all that it wants.
        enough: the share of a round's groups on a device after which the others are aborted; 1: none are.
        stays: whether engines go on with what is unfinished from where it is; ``schedule.stream`` sets it.
        temperature: what the logits are divided by; 0 takes the most likely token.
        top_p: the smallest set of tokens with this probability is kept; 1 keeps all.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        min_p: tokens less likely than this share of the most likely one are dropped; 0 keeps all.
        stop: texts that end a response; the one that does is part of it, with the whole of its last token.
        stop_token_ids: tokens that end a response, by their ids; the one that does is part of it.
        repetition_penalty: by how much tokens that the round has become less likely; 1: not at all.
        presence_penalty: what is taken off the logits of such tokens.
        frequency_penalty: what is taken off them for each time that they came.
        min_new_tokens: how many tokens a response has at least before its end token.

    Example:
        rollout: {op: rollout.partial, model: policy, n: 8, max_new_tokens: 4096, chunk: 1024}
    """
    ids = prompt.tolist()
    limits = response_limits(ctx, ids, max_new_tokens, max_total_tokens)
    samples = [*_begun(ctx), *[Generation()] * (n * len(ids))][: n * len(ids)]
    stays &= ctx.resumes
    if not ctx.resumes:
        most, wanted = max_new_tokens, len(ids)
    elif stays and model.overlaps:
        most, wanted = max_new_tokens, 1
    else:
        most, wanted = min(chunk or max_new_tokens, max_new_tokens), math.ceil(enough * len(ids))
    rows = [row * n + k for row in ctx.rows for k in range(n)]
    seeds = [seed(ctx.seed, ctx.iteration, ctx.node, row) for row in rows]
    before = sum(len(sample.tokens) for sample in samples)
    sampling = Sampling(
        *(most, temperature, top_p, top_k, min_p, stop, stop_token_ids),
        *(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens),
    )
    _go_on(model, ids, samples, seeds, limits, sampling, wanted, stays, ctx.is_due)
    generated = sum(len(sample.tokens) for sample in samples) - before
    ctx.record("tokens/generated", generated, kind="sum", over="tokens")
    groups = [samples[i * n : i * n + n] for i in range(len(ids))]
    whole = [i for i, group in enumerate(groups) if all(_ended(s, limits[i]) for s in group)]
    if ctx.resumes:
        _leave(ctx, whole, groups)
    return _written(model, ctx, [(ids[i], ctx.rows[i], groups[i]) for i in whole])


def _go_on(
    model: ServeEngine,
    ids: Sequence[list[int]],
    samples: list[Generation],
    seeds: Sequence[int],
    limits: Sequence[int],
    sampling: Sampling,
    wanted: int,
    stays: bool,
    is_due: Callable[[], bool],
) -> None:
    """Give every sample that has not ended more tokens, until so many groups have nothing that runs.

    ``limits`` are the most tokens of a response to each prompt. Those of a prompt that have none yet share
    it.
    """
    requests, owners = [], []
    n = len(samples) // len(ids) if ids else 1
    for first in range(0, len(samples), n):
        longest = limits[first // n]
        members = [i for i in range(first, first + n) if not _ended(samples[i], longest)]
        fresh = [i for i in members if not samples[i].tokens]
        for group in (fresh, *([i] for i in members if samples[i].tokens)):
            if group:
                done = samples[group[0]].tokens
                limit = min(sampling.max_new_tokens, longest - len(done))
                asked = [seeds[i] for i in group]
                whole = [*ids[first // n], *done]
                requests.append(Request(whole, asked, max_new_tokens=limit, drawn=len(done)))
                owners.append(group)
    enough = _quorum(owners, n, wanted, is_due) if stays or wanted < len(ids) else None
    for group, answers in zip(owners, model.generate(requests, sampling, enough, stays), strict=True):
        for i, answer in zip(group, answers, strict=True):
            samples[i] = extended(samples[i], answer, model, sampling.stop)


def _quorum(owners: Sequence[Sequence[int]], n: int, wanted: int, is_due: Callable[[], bool]) -> Enough:
    """Return a test whether so many groups of ``n`` ended, or the round is due to.

    ``owners`` are the samples of each request.
    """
    running = Counter(i // n for samples in owners for i in samples)

    def enough(ended: Sequence[int]) -> bool:
        running.subtract(owners[request][0] // n for request in ended)
        return is_due() or sum(not count for count in running.values()) >= wanted

    return enough


def extended(sample: Generation, answer: Generation, model: ServeEngine, stop: Sequence[str]) -> Generation:
    """Return a sample with what was drawn behind it, up to a stop text that lies across both."""
    versions = answer.versions or [model.version] * len(answer.tokens)
    whole = sample.followed(replace(answer, versions=versions))
    return cut_at_text(model.tokenizer, whole, stop, len(sample.tokens)) if stop and sample.tokens else whole


def _ended(sample: Generation, longest: int) -> bool:
    return sample.is_whole or len(sample.tokens) >= longest


def _begun(ctx: Context) -> Iterator[Generation]:
    """Yield the samples that an earlier round has begun."""
    if ctx.begun:
        ids, logprobs, versions, stopped = (column.tolist() for column in ctx.begun)
        for own, measured, drawn, ended in zip(ids, logprobs, versions, stopped, strict=True):
            yield Generation(own, measured, "stop" if ended else "abort", drawn)


def _leave(ctx: Context, whole: Sequence[int], groups: Sequence[Sequence[Generation]]) -> None:
    done = {*whole}
    rest = [sample for i, group in enumerate(groups) if i not in done for sample in group]
    ctx.leave(
        numpy.array(whole, numpy.int64),
        Ragged.of([sample.tokens for sample in rest], torch.int64),
        Ragged.of([sample.logprobs for sample in rest], torch.float32),
        Ragged.of([sample.versions for sample in rest], torch.int64),
        torch.tensor([sample.is_whole for sample in rest], dtype=torch.bool),
    )


def _written(
    model: ServeEngine, ctx: Context, groups: Sequence[tuple[list[int], int, Sequence[Generation]]]
) -> PartialRollout:
    """Return the columns of whole groups: (prompt ids, the prompt's number, samples)."""
    each = [(ids, number, sample) for ids, number, members in groups for sample in members]
    pairs = [(ids, s if s.is_whole else replace(s, finish="length")) for ids, _, s in each]
    columns = assemble(model.tokenizer, pairs, [int(number) for _, number, _ in each])
    record_lengths(ctx, pairs, columns.responses)
    versions = Ragged.of([[-1] * len(ids) + [*s.versions] for ids, _, s in each], torch.int64)
    shared = {name: getattr(columns, name) for name in PartialRollout._fields if name in columns._fields}
    return PartialRollout(**shared, token_versions=versions)
