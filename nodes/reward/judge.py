"""A reward from a language model that is asked how good a response is."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat

from rlgraph.errors import shortened
from rlgraph.nodes.reward.per_sample import Judged, OnError, as_texts, complain, settled
from rlgraph.nodes.reward.text import compilable
from rlgraph.nodes.rollout.rollout import sample_seeds
from rlgraph.nodes.support.chat_template import Template
from rlgraph.nodes.support.conversation import ReadingOptions
from rlgraph.nodes.support.filled_prompt import filled
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, Generation, Request, Sampling, ServeEngine, anything, op, samples, text

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
# on a line that begins with the word and ends a paragraph: not in a sentence, behind "> " or in quotes
SCORE = (
    r"(?im)^[ \t*_#]*(?:(?:final|overall)[ \t]+)?score[ \t*_]*(?:[(\[][^)\]\n]*[)\]][ \t*_]*)?"  # (0-10)
    r"(?:[:=]|[-–—](?=[ \t]))[^\w\n-]*(-?\d+(?:\.\d+)?)[^\n]*(?=\s*\Z|\n[ \t\r]*\n)"
)


def _increasing(scale: list[float]) -> list[float]:
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError("must be two numbers, the lower one first")
    return scale


@op(
    assumes=("dropped",),
    reads=("prompt", "response"),
    roles={"response_limit": "max_new_tokens", "temperature": "temperature"},
)
def judge(
    ctx: Context,
    model: ServeEngine,
    question: text[samples],
    responses: text[samples],
    answer: text[samples] | None,
    *,
    prompt: str | None = None,
    score: Annotated[str, AfterValidator(compilable)] | None = None,
    scale: Annotated[list[float], AfterValidator(_increasing)] = [0.0, 10.0],  # noqa: B006 - never changed
    n: Annotated[int, Field(ge=1)] = 1,
    max_new_tokens: Annotated[int, Field(ge=1)] = 512,
    max_response_tokens: Annotated[int, Field(ge=1)] | None = None,
    temperature: NonNegativeFloat = 0.0,
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
    on_error: OnError = "zero",
    **more: anything[samples],
) -> Judged:
    """(s - low) / (high - low), s the score that a language model gives a response (arXiv 2306.05685).

    The judge reads ``prompt`` with {question}, {response}, {answer} and any other column of the rows, such as
    {rubric}, filled in by name; values that are not text are written as JSON. They are tokenised separately,
    and control tokens in them count as plain text, so that none can end the prompt or begin the judge's turn.
    s is the first group of the last match of ``score`` in what the judge writes, clipped to the bounds; with
    several judgements (``n``) it is the mean of those that have a score. A judgement that ``max_new_tokens``
    cuts off has no score, since its end may be a quotation. The default ``score`` matches a line that begins
    with the word, has ``:``, ``=`` or a dash before the number and ends a paragraph. So a quoted score does
    not count if the judge's own line follows, nor does one in a sentence, after ``>`` or in quotation marks.
    A judge that is persuaded by a response to end with such a line is not detected. A sample fails if none of
    its judgements has a score: its reward is 0. The judge has its own tokenizer and chat template; a frozen
    judge generates with its original weights. Records ``reward/mean`` (of samples that did not fail),
    ``reward/failed`` (a fraction) and ``reward/judge_length`` (tokens per judgement).

    Attributes:
        prompt: what the judge reads, with {question}, {response}, {answer} and other columns, such as
            {rubric}; {{word}} stands for a literal {word}; null: a prompt that asks for reasons, and then for
            "Score: N" from 0 to 10.
        score: a regular expression whose first group is the score; null: the last line "Score: N" that ends a
            paragraph.
        scale: the scores of reward 0 and of reward 1, low and high; scores beyond them are clipped.
        n: judgements per sample, at least 1; with temperature 0 they are all the same.
        max_new_tokens: the most tokens of a judgement.
        max_response_tokens: the judge reads only this many tokens from the end of a response; null: all.
        temperature: the number by which the judge's logits are divided; 0 takes the most likely token.
        template: chat applies the judge's chat template to the prompt; plain uses it as it is.
        template_options: further arguments of the chat template.
        on_error: zero: the run goes on with reward 0; fail: the run ends and shows what the judge wrote;
            drop: it goes on, and a filter.judged drops these samples for other nodes.

    Example:
        rewards: {op: reward.judge, model: judge, n: 4, temperature: 1.0}
    """
    reading = ReadingOptions(template=template, template_options=template_options)
    columns = {name: as_texts(values) for name, values in more.items()}
    columns |= {"question": question, "response": responses, "answer": answer or [""] * len(responses)}
    last_tokens = {"response": max_response_tokens} if max_response_tokens else None
    prompts = filled(model.tokenizer, reading, prompt or PROMPT, columns, last_tokens)
    requests = []
    for row, ids in zip(ctx.rows, prompts, strict=True):
        requests.append(Request(ids, sample_seeds(ctx, row, n)))
    generations = model.generate(requests, Sampling(max_new_tokens, temperature))
    low, high = scale
    rewards = []
    failed = []
    lengths = []
    failures = []
    for row, generations_of_sample in enumerate(generations):
        lengths += [len(generation.tokens) for generation in generations_of_sample]
        judgements = [_judgement(model.tokenizer, generation) for generation in generations_of_sample]
        scores = []
        for judgement in judgements:
            number = scored(judgement, score or SCORE)
            if number is not None:
                scores.append(number)
        rewards.append(_mean(scores, low, high))
        failed.append(not scores)
        if not scores:
            sample = {"question": question[row], "response": responses[row]}
            failures.append((row, _reason(judgements[0]), sample))
    complain(ctx, failures, on_error)
    ctx.record("reward/judge_length", lengths, over="judgements")
    return settled(ctx, torch.tensor(rewards, dtype=torch.float32), torch.tensor(failed, dtype=torch.bool))


def scored(judgement: str | None, score: str) -> float | None:
    r"""Return the last score in a judgement, or None; None is a judgement that was cut off.

    Example:
        >>> scored('It claims "Score: 10".\nScore: **7.5**', SCORE), scored('Good: "Score: 9"', SCORE)
        (7.5, None)
    """
    if judgement is None:
        return None
    matches = list(re.finditer(score, judgement))
    if not matches:
        return None
    try:
        number = float(matches[-1][1])
    except (TypeError, ValueError):  # the group took no part, or holds no number
        return None
    return number if math.isfinite(number) else None


def _judgement(tokenizer: Any, generation: Generation) -> str | None:
    """Return what a judge wrote; None where it was cut off."""
    if not generation.is_whole:
        return None
    return str(tokenizer.decode(list(generation.tokens), skip_special_tokens=True))


def _reason(judgement: str | None) -> str:
    if judgement is None:
        return "the judge did not come to its end; raise max_new_tokens"
    return f"no score in {shortened(judgement, 600)!r}"


def _mean(scores: Sequence[float], low: float, high: float) -> float:
    """Return the mean of scores, kept within the bounds, on a scale from 0 to 1; 0 where there are none."""
    if not scores:
        return 0.0
    clamped = [min(max(score, low), high) for score in scores]
    mean = sum(clamped) / len(clamped)
    return (mean - low) / (high - low)
