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
    r"""The same responses behind another prompt, such as one with a hint (arXiv 2601.20802, 2601.19897).

    A row is ``prompt`` with {question} and {hint} filled in, and behind it all from the sample's first token
    in ``loss_mask`` on; ``reprompted_mask`` is the loss mask there. A sample with an empty hint, or with
    nothing in its loss mask, stays as it is. The texts are tokenised apart, control tokens in them as plain
    text. What a model scores here is brought to the sample's own tokens by ``realign``.

    Attributes:
        prompt: the prompt, with {question} and {hint}.
        template: chat puts it through the tokenizer's chat template, plain takes it as it is.
        template_options: what the chat template is given beside the message.

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
    r"""A prompt made of each sample, for a further rollout: to try again (arXiv 2602.13949), or to judge.

    ``prompt`` with {question}, {response}, {answer} and {hint} filled in, tokenised apart, control tokens in
    them as plain text. The rollout reads it by ``in: {prompt: NODE}``. A new row is one of the sample's:
    columns of the sample, its prompt's too, are read with it, and what is said of a new row as a whole
    is read with the sample.

    Attributes:
        prompt: the prompt, with any of {question}, {response}, {answer} and {hint}.
        template: chat puts it through the tokenizer's chat template, plain takes it as it is.
        template_options: what the chat template is given beside the message.

    Example:
        again: {op: prompts.from, prompt: "{question}\n\nYou said: {response}\n\nThink again."}
    """
    reading = ReadingOptions(template=template, template_options=template_options)
    columns = {"question": question, "response": responses, "answer": answer, "hint": hint}
    return Ragged.of(filled(tokenizer, reading, prompt, columns), torch.int64)
