"""Reward functions as TRL calls them."""

import re

NUMBER = re.compile(r"-?\d+")


def correct(completions, answer, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(NUMBER.findall(text)[-1:] == [str(a)]) for text, a in zip(texts, answer)]


async def short(completions, **kwargs):
    return [None if not c else -len(c) / 1000 for c in completions]
