"""Partial rollouts: sampling that leaves the longest samples for later rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from pydantic import Field

from rlgraph.nodes.rollout.rollout import assemble, record_drawn, sample_seeds
from rlgraph.nodes.rollout.sampling import (
    CUTS_WITH_TEMPERATURE,
    SAMPLING_ROLES,
    ResponseLimits,
    SamplingAttributes,
)
from rlgraph.nodes.rollout.stop_text import cut_at_text
from rlgraph.nodes.support.lazy import numpy, torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Enough, Generation, Request, Sampling, ServeEngine, op
from rlgraph.ops.column_types import boolean, float32, int64, prompt_tokens, prompts, samples, text, tokens

# columns of unfinished samples: token ids, log-probs and versions, and whether each has ended
UNFINISHED_COLUMNS = 4


class PartialRollout(NamedTuple):
    """The columns that ``rollout.partial`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]
    token_versions: int64[samples, tokens]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]


@op(
    makes="samples",
    times="n",
    rows="each",
    leaves=UNFINISHED_COLUMNS,
    when=CUTS_WITH_TEMPERATURE,
    roles=SAMPLING_ROLES,
)
def partial(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    limits: ResponseLimits,
    chunk: Annotated[int, Field(ge=1)] | None = None,
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0,
    stays: bool = False,
    sampling: SamplingAttributes,
) -> PartialRollout:
    """Sample as ``rollout`` does, but leave the longest samples to later rounds: partial rollouts.

    For the steps before a filter with ``refill``. A round gives each sample at most ``chunk`` tokens, and
    ends once the share ``enough`` of its groups have ended; the engine then aborts the others. A group moves
    on to the next step once all its samples have ended; unfinished samples continue in the next round from
    the tokens that they have. So the first groups to end are the first to be used. Once there are enough, the
    rest waits for the next iteration, which continues it with newer weights (``schedule.buffer``), or is
    discarded. With ``chunk``, which groups are first depends on their tokens, not on time, and so only on the
    seed. With ``enough`` it depends on each device: the embedded engine gives the same groups every time on
    the same number of devices, servers give whichever end first.

    With ``stays``, which is set when generation streams, engines keep working on unfinished samples. The
    embedded engine keeps the keys and values of samples that it cut until the next round, or until new
    weights: a chunk then costs no more than its own tokens. Servers keep samples in flight between rounds:
    there ``chunk`` and ``enough`` are ignored, a round ends with the first group or after a second, and no
    sample is aborted until new weights arrive or the run discards it. Every round ends early if new weights
    wait for it, or if the round of another device has ended.

    Within an iteration a sample is the one that ``rollout`` would draw, except for penalties, which count
    only the tokens of the current round, or those since the sample was last requested from a server. It takes
    no grammars, which each round would start again. Outside of such a region all samples run to their end at
    once.

    ``token_versions`` is the version of the weights that drew each token, counted in updates from the start
    of the run; -1 on the prompt. Everything else is as for ``rollout``; ``tokens/generated`` counts all
    tokens of the round, whether or not they are used. Partial rollouts: Kimi k1.5, arXiv 2501.12599.

    Attributes:
        chunk: the most tokens per response and round; null: a response runs to its end.
        enough: once this share of a round's groups on a device have ended, the others are aborted; 1: none
            are.
        stays: whether engines keep working on unfinished samples between rounds; set when generation streams.
        repetition_penalty: by how much tokens that are already in the round become less likely; 1: not at
            all.

    Example:
        rollout: {op: rollout.partial, model: policy, n: 8, max_new_tokens: 4096, chunk: 1024}
    """
    prompt_ids = prompt.tolist()
    longest = limits.of_prompts(ctx, prompt_ids)
    seeds = []
    for row in ctx.rows:
        seeds += sample_seeds(ctx, row, limits.n)
    samples = _samples_of_earlier_rounds(ctx)
    samples += [Generation()] * (len(seeds) - len(samples))
    tokens_before = sum(len(sample.tokens) for sample in samples)

    engine_goes_on = stays and ctx.resumes
    round_tokens = limits.max_new_tokens
    wanted_groups = len(prompt_ids)
    if engine_goes_on and model.overlaps:
        wanted_groups = 1
    elif ctx.resumes:
        round_tokens = min(chunk or limits.max_new_tokens, limits.max_new_tokens)
        wanted_groups = math.ceil(enough * len(prompt_ids))
    settings = sampling.settings(round_tokens)
    _draw_round(
        model, prompt_ids, samples, seeds, longest, settings, wanted_groups, engine_goes_on, ctx.is_due
    )

    generated = sum(len(sample.tokens) for sample in samples) - tokens_before
    ctx.record("tokens/generated", generated, kind="sum", over="tokens")
    groups = []
    finished = []
    for i, longest_response in enumerate(longest):
        group = samples[i * limits.n : (i + 1) * limits.n]
        groups.append(group)
        if all(_has_ended(sample, longest_response) for sample in group):
            finished.append(i)
    if ctx.resumes:
        _leave_unfinished(ctx, finished, groups)
    return _columns(model, ctx, prompt_ids, groups, finished)


def _draw_round(
    model: ServeEngine,
    prompts: Sequence[list[int]],
    samples: list[Generation],
    seeds: Sequence[int],
    longest: Sequence[int],
    sampling: Sampling,
    wanted_groups: int,
    engine_goes_on: bool,
    is_due: Callable[[], bool],
) -> None:
    """Give every sample that has not ended more tokens, until so many groups have nothing that runs.

    Args:
        model: what draws them.
        prompts: token ids, of as many samples each.
        samples: those of the first prompt, then of the second, and so on; replaced by longer ones.
        seeds: of each sample.
        longest: the most tokens of a response to each prompt.
        sampling: whose ``max_new_tokens`` is the most that a sample gets in this round.
        wanted_groups: how many prompts have to have all their samples before the others are cut.
        engine_goes_on: whether the engine goes on with what it did not finish (``ServeEngine.generate``).
        is_due: whether the round is to end now.
    """
    n = len(samples) // len(prompts) if prompts else 1
    requests = []
    owners = []  # of each request the samples that it is for
    for row, ids in enumerate(prompts):
        for share in _shares(samples, range(row * n, row * n + n), longest[row]):
            drawn_ids = samples[share[0]].tokens
            limit = min(sampling.max_new_tokens, longest[row] - len(drawn_ids))
            requests.append(
                Request(
                    [*ids, *drawn_ids],
                    [seeds[i] for i in share],
                    max_new_tokens=limit,
                    drawn=len(drawn_ids),
                )
            )
            owners.append(share)
    enough = None
    if engine_goes_on or wanted_groups < len(prompts):
        enough = _quorum(owners, n, wanted_groups, is_due)
    generations = model.generate(requests, sampling, enough, engine_goes_on)
    for share, answers in zip(owners, generations, strict=True):
        for i, answer in zip(share, answers, strict=True):
            samples[i] = extended(samples[i], answer, model, sampling.stop)


def _shares(samples: Sequence[Generation], group: Sequence[int], longest: int) -> list[list[int]]:
    """Return which samples of a group share a request: those without tokens, which have one prompt.

    Any other goes on behind its own tokens. Samples that have ended are in none.
    """
    without_tokens = []
    with_tokens = []
    for i in group:
        if _has_ended(samples[i], longest):
            continue
        if samples[i].tokens:
            with_tokens.append([i])
        else:
            without_tokens.append(i)
    if without_tokens:
        return [without_tokens, *with_tokens]
    return with_tokens


def _quorum(owners: Sequence[Sequence[int]], n: int, wanted: int, is_due: Callable[[], bool]) -> Enough:
    """Return a test whether so many groups of ``n`` have ended, or the round is due to end.

    ``owners`` are the samples of each request.
    """
    running = Counter(sample // n for share in owners for sample in share)

    def is_enough(ended: Sequence[int]) -> bool:
        running.subtract(owners[request][0] // n for request in ended)
        ended_groups = sum(count == 0 for count in running.values())
        return is_due() or ended_groups >= wanted

    return is_enough


def extended(sample: Generation, answer: Generation, model: ServeEngine, stop: Sequence[str]) -> Generation:
    """Return a sample with what was drawn behind it, up to a stop text that lies across both."""
    versions = answer.versions or [model.version] * len(answer.tokens)
    longer = sample.followed(replace(answer, versions=versions))
    if stop and sample.tokens:
        return cut_at_text(model.tokenizer, longer, stop, len(sample.tokens))
    return longer


def _has_ended(sample: Generation, longest: int) -> bool:
    return sample.is_whole or len(sample.tokens) >= longest


def _samples_of_earlier_rounds(ctx: Context) -> list[Generation]:
    """Return the samples that earlier rounds have left unfinished."""
    if not ctx.begun:
        return []
    ids, logprobs, versions, has_ended = (column.tolist() for column in ctx.begun)
    finish = ["stop" if ended else "abort" for ended in has_ended]
    return [Generation(*fields) for fields in zip(ids, logprobs, finish, versions, strict=True)]


def _leave_unfinished(ctx: Context, finished: Sequence[int], groups: Sequence[Sequence[Generation]]) -> None:
    """Leave the samples of unfinished groups to the next round; ``_samples_of_earlier_rounds`` reads them."""
    finished_groups = set(finished)
    unfinished: list[Generation] = []
    for i, group in enumerate(groups):
        if i not in finished_groups:
            unfinished += group
    ctx.leave(
        numpy.array(finished, numpy.int64),
        Ragged.of([sample.tokens for sample in unfinished], torch.int64),
        Ragged.of([sample.logprobs for sample in unfinished], torch.float32),
        Ragged.of([sample.versions for sample in unfinished], torch.int64),
        torch.tensor([sample.is_whole for sample in unfinished], dtype=torch.bool),
    )


def _columns(
    model: ServeEngine,
    ctx: Context,
    prompts: Sequence[list[int]],
    groups: Sequence[Sequence[Generation]],
    finished: Sequence[int],
) -> PartialRollout:
    """Return the columns of the groups that are finished."""
    prompts_and_samples = []
    group_numbers = []
    versions = []
    for i in finished:
        for sample in groups[i]:
            if not sample.is_whole:  # it has as many tokens as it may have
                sample = replace(sample, finish="length")
            prompts_and_samples.append((prompts[i], sample))
            group_numbers.append(int(ctx.rows[i]))
            versions.append([-1] * len(prompts[i]) + [*sample.versions])
    columns = assemble(model.tokenizer, prompts_and_samples, group_numbers)
    record_drawn(ctx, prompts_and_samples, columns.responses)
    return PartialRollout(
        tokens=columns.tokens,
        loss_mask=columns.loss_mask,
        rollout_logprobs=columns.rollout_logprobs,
        token_versions=Ragged.of(versions, torch.int64),
        responses=columns.responses,
        group=columns.group,
        truncated=columns.truncated,
    )
