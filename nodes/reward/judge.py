"""A reward from a language model that is asked how good a response is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat

from rlgraph.nodes.reward.per_sample import Judged, OnError, complain, settled
from rlgraph.nodes.reward.text import compilable
from rlgraph.nodes.rollout.rollout import seed
from rlgraph.nodes.support.dataset import ReadingOptions, Template, encode
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, Request, Sampling, ServeEngine, op, samples, text

PLACE = re.compile(r"\{(question|response|answer)\}")
PROMPT = """\
Judge how good a response to a question is.

Question:
{question}

Reference answer:
{answer}

Response:
{response}

First give your reasons in a few sentences. Then write "Score: N" on the last line, N a whole number \
from 0 (useless) to 10 (perfect)."""
SCORE = r"(?i)score[^\w-]*(-?\d+(?:\.\d+)?)"


def _increasing(scale: list[float]) -> list[float]:
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError("must be two numbers, the lower one first")
    return scale


@op(assumes=("dropped",), roles={"response_limit": "max_new_tokens", "temperature": "temperature"})
def judge(
    ctx: Context,
    model: ServeEngine,
    question: text[samples],
    responses: text[samples],
    answer: text[samples] | None,
    *,
    prompt: str | None = None,
    score: Annotated[str, AfterValidator(compilable)] = SCORE,
    scale: Annotated[list[float], AfterValidator(_increasing)] = [0.0, 10.0],  # noqa: B006 - never changed
    n: Annotated[int, Field(ge=1)] = 1,
    max_new_tokens: Annotated[int, Field(ge=1)] = 512,
    max_response_tokens: Annotated[int, Field(ge=1)] | None = None,
    temperature: NonNegativeFloat = 0.0,
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
    on_error: OnError = "zero",
) -> Judged:
    """(s - low) / (high - low), s the score that a language model gives a response (arXiv 2306.05685).

    The judge reads ``prompt`` with {question}, {response} and {answer} filled in, and s is what the first
    group of the last match of ``score`` holds in what it writes, kept within the bounds; with n > 1 the mean
    of those that have one. A sample none of whose judgements has a score has failed: its reward is 0. The
    judge has its own tokenizer and chat template; a frozen one is generated with as it came. Records
    ``reward/mean`` (of what did not fail), ``reward/failed`` (a fraction) and ``reward/judge_length`` (tokens
    a judgement).

    Attributes:
        prompt: what the judge reads, with {question}, {response} and {answer}; null: one that asks for
            reasons, and then for "Score: N" from 0 to 10.
        score: a regular expression; its first group is the score.
        scale: the scores of reward 0 and of reward 1, low and high; those beyond count as these.
        n: judgements per sample, at least 1; with temperature 0 all are the same.
        max_new_tokens: the most tokens of a judgement.
        max_response_tokens: the judge reads so many tokens of a response's end; null: all.
        temperature: what the judge's logits are divided by; 0 takes the most likely token.
        template: chat puts the prompt through the judge's chat template; plain takes it as it is.
        template_options: what the chat template is given beside the message.
        on_error: zero goes on with reward 0; fail ends the run, saying what the judge wrote; drop goes on,
            where other nodes read the rows of a filter.judged alone.

    Example:
        rewards: {op: reward.judge, model: judge, n: 4, temperature: 1.0}
    """
    answers = answer or [""] * len(responses)
    shown = [_end(model.tokenizer, response, max_response_tokens) for response in responses]
    asked = [_filled(prompt or PROMPT, *row) for row in zip(question, shown, answers, strict=True)]
    seeds = [[seed(ctx.seed, ctx.iteration, ctx.node, row * n + k) for k in range(n)] for row in ctx.rows]
    reading = ReadingOptions(template=template, template_options=template_options)
    prompts = encode(model.tokenizer, reading, asked) if asked else []
    requests = [Request(ids, own) for ids, own in zip(prompts, seeds, strict=True)]
    generations = model.generate(requests, Sampling(max_new_tokens, temperature))
    written = [
        [model.tokenizer.decode(list(g.tokens), skip_special_tokens=True) for g in many]
        for many in generations
    ]
    scores = [[s for words in many if (s := scored(words, score)) is not None] for many in written]
    missing = zip(scores, written, asked, strict=True)
    failures = [(f"no score in {words[0][-300:]!r}", {"asked": a}) for s, words, a in missing if not s]
    complain(failures, on_error)
    ctx.record("reward/judge_length", [len(g.tokens) for many in generations for g in many])
    rewards = torch.tensor([_mean(s, *scale) for s in scores], dtype=torch.float32)
    return settled(ctx, rewards, torch.tensor([not s for s in scores], dtype=torch.bool))


def scored(words: str, score: str) -> float | None:
    r"""Return the last score in a judgement, or None.

    Example:
        >>> scored("Score: 3? No.\nScore: **7.5**", SCORE), scored("Good!", SCORE)
        (7.5, None)
    """
    scores = [match[1] for match in re.finditer(score, words)]
    try:
        number = float(scores[-1]) if scores else math.nan
    except (TypeError, ValueError):  # the group took no part, or holds no number
        return None
    return number if math.isfinite(number) else None


def _mean(scores: Sequence[float], low: float, high: float) -> float:
    kept = [min(max(score, low), high) for score in scores]
    return (sum(kept) / len(kept) - low) / (high - low) if kept else 0.0


def _filled(prompt: str, question: str, response: str, answer: str) -> str:
    """Fill in all fields at once, so that a response that holds ``{answer}`` does not get it."""
    values = {"question": question, "response": response, "answer": answer}
    return PLACE.sub(lambda place: values[place[1]], prompt)


def _end(tokenizer: Any, response: str, limit: int | None) -> str:
    if limit is None:
        return response
    return str(tokenizer.decode(tokenizer(response, add_special_tokens=False)["input_ids"][-limit:]))
