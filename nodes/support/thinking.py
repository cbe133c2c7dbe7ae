"""The part of a response outside of its thinking, by the marks that current model families write."""

import re

# opening and closing marks: DeepSeek R1, Qwen3 and GLM; words written out; Mistral; Kimi; Seed; Cohere
MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
# gpt-oss: with its control tokens, and as it is left once they are dropped
HARMONY = re.compile(
    r"\A(?:<\|channel\|>)?analysis(?:<\|message\|>)?.*?(?:<\|channel\|>final<\|message\|>|assistantfinal)",
    re.DOTALL,
)
HARMONY_OPEN = re.compile(r"\A<\|channel\|>analysis")


def outside_thinking(response: str) -> str:
    """Return what stands behind the thinking of a response; nothing where its thinking does not end.

    A chat template may have opened the thinking, so a closing mark alone ends it too. Thinking that the
    template opened and the response never closes can't be told from an answer.

    Example:
        >>> outside_thinking("maybe 7</think>It is 5."), outside_thinking("<think>maybe 5")
        ('It is 5.', '')
    """
    harmony = HARMONY.match(response)
    if harmony:
        return response[harmony.end() :]
    if HARMONY_OPEN.match(response):
        return ""
    for opening, closing in MARKS:
        _, closed, remainder = response.rpartition(closing)
        if closed:
            response = remainder
        opening_place = response.find(opening)
        if opening_place >= 0:
            response = response[:opening_place]
    return response


def without_thinking(response: str) -> str:
    """Return a response without its thinking, of which it may have several parts between what it says.

    Example:
        >>> without_thinking("maybe</think>Look: <think>so</think>5"), without_thinking("5<think>or")
        ('Look: 5', '5')
    """
    return split_thinking(response)[1]


def split_thinking(response: str) -> tuple[str, str]:
    """Return the thinking of a response, without its marks, and what it says; each may have several parts.

    Example:
        >>> split_thinking("maybe</think>Look: <think>so</think>5")
        ('maybeso', 'Look: 5')
    """
    if HARMONY.match(response) or HARMONY_OPEN.match(response):
        said = outside_thinking(response)
        return response[: len(response) - len(said)], said
    thinking = ""
    for opening, closing in MARKS:
        text_before, is_closed, text_behind = response.partition(closing)
        if is_closed and opening not in text_before:
            thinking += text_before  # the chat template had opened it
            response = text_behind
        said, *blocks = response.split(opening)
        for block in blocks:
            block_thinking, _, text_behind = block.partition(closing)
            thinking += block_thinking
            said += text_behind
        response = said
    return thinking, response
