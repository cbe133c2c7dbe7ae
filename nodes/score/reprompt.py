"""Prompts made of samples: the same response behind another prompt, and prompts for a further rollout.

sample            12+45=  |  58 <eos>
reprompt          Hint: 57. 12+45=  |  58 <eos>          the policy scores its own response, better informed
prompts.from      12+45=58 Is that right? 12+45=         the policy is asked again
"""

from typing import Any, NamedTuple

from rlgraph.nodes.support.chat_template import Template
from rlgraph.nodes.support.conversation import ReadingOptions
from rlgraph.nodes.support.filled_prompt import filled
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import (
    Tokenizer,
    boolean,
    int64,
    op,
    other_tokens,
    prompt_tokens,
    prompts,
    samples,
    text,
    tokens,
)


class Reprompted(NamedTuple):
    """The columns that ``reprompt`` writes."""

    reprompted_tokens: int64[samples, tokens]
    reprompted_mask: boolean[samples, tokens]


@op()
def reprompt(
    tokenizer: Tokenizer,
    tokens: int64[samples, other_tokens],
    loss_mask: boolean[samples, other_tokens],
    question: text[samples],
    hint: text[samples] | None,
    *,
    prompt: str,
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
) -> Reprompted:
    r"""The same responses after another prompt, such as one with a hint (arXiv 2601.20802, 2601.19897).

    A row is ``prompt`` with {question} and {hint} filled in, followed by everything from the sample's first
    token in ``loss_mask`` on; ``reprompted_mask`` is its loss mask. A sample with an empty hint, or with
    nothing in its loss mask, is unchanged. The texts are tokenised separately, and control tokens in them
    count as plain text. ``realign`` moves a model's scores of these rows back to the sample's own tokens.

    Attributes:
        prompt: the prompt, with {question} and {hint}.
        template: chat applies the tokenizer's chat template to it; plain uses it as it is.
        template_options: further arguments of the chat template.

    Example:
        hinted: {op: reprompt, in: {hint: answer}, prompt: "{question}\n\nThe answer is {hint}."}
    """
    reading = ReadingOptions(template=template, template_options=template_options)
    prompt_ids = filled(tokenizer, reading, prompt, {"question": question, "hint": hint})
    rows, masks = [], []
    for row, new_prompt in enumerate(prompt_ids):
        ids, mask = tokens[row].tolist(), loss_mask[row].tolist()
        response_start = mask.index(True) if True in mask else 0
        if response_start and (hint is None or hint[row]):
            ids, mask = new_prompt + ids[response_start:], [False] * len(new_prompt) + mask[response_start:]
        rows.append(ids)
        masks.append(mask)
    return Reprompted(Ragged.of(rows, torch.int64), Ragged.of(masks, torch.bool))


@op(makes="prompts")
def from_rows(
    tokenizer: Tokenizer,
    question: text[samples],
    responses: text[samples],
    answer: text[samples] | None,
    hint: text[samples] | None,
    *,
    prompt: str,
    template: Template = "chat",
    template_options: dict[str, Any] | None = None,
) -> int64[prompts, prompt_tokens]:
    r"""A prompt made from each sample, for another rollout: to try again (arXiv 2602.13949), or to judge.

    ``prompt`` with {question}, {response}, {answer} and {hint} filled in; they are tokenised separately, and
    control tokens in them count as plain text. The rollout reads it through ``in: {prompt: NODE}``. A new row
    belongs to its sample: columns of the sample and of its prompt can be read with the new row, and columns
    with one value per new row can be read with the sample.

    Attributes:
        prompt: the prompt, with any of {question}, {response}, {answer} and {hint}.
        template: chat applies the tokenizer's chat template to it; plain uses it as it is.
        template_options: further arguments of the chat template.

    Example:
        again: {op: prompts.from, prompt: "{question}\n\nYou said: {response}\n\nThink again."}
    """
    reading = ReadingOptions(template=template, template_options=template_options)
    columns = {"question": question, "response": responses, "answer": answer, "hint": hint}
    return Ragged.of(filled(tokenizer, reading, prompt, columns), torch.int64)
