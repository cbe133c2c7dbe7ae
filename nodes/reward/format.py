"""A reward for a response that matches a pattern."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, float32, op, samples, text


def compilable(pattern: str) -> str:
    """Return a pattern as it is.

    Raises:
        ValueError: it is no regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return pattern


@op()
def form(
    ctx: Context, responses: text[samples], *, pattern: Annotated[str, AfterValidator(compilable)]
) -> float32[samples]:
    r"""1.0 where a regular expression matches the whole response, white space at both ends aside, else 0.0.

    Python's ``re``, with ``.`` matching line breaks too. The pattern is trusted: one that backtracks without
    end (``(a+)+b``) has no time limit. The format reward of DeepSeek-R1 (arXiv 2501.12948). Records ``mean``
    under the node's name, as it stands beside another reward.

    Attributes:
        pattern: what a response must look like, as ``<think>.+</think>.*\\boxed\{.+\}.*``.

    Example:
        formatted: {op: reward.format, pattern: "<think>.+</think>.+"}
    """
    wanted = re.compile(pattern, re.DOTALL)
    scores = [float(wanted.fullmatch(response.strip()) is not None) for response in responses]
    ctx.record("mean", scores)
    return torch.tensor(scores, dtype=torch.float32)
