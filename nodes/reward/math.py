"""A reward for a mathematically equal answer."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from rlgraph.nodes.reward.text import alternatives
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import SPREAD, Context, float32, json, op, samples, text


@op(beside=True, assumes=("answered",))
def math(
    ctx: Context,
    responses: text[samples],
    answer: text[samples] | None,
    answers: json[samples] | None = None,
    *,
    unevaluated: bool = False,
    timeout: PositiveFloat = 5.0,
    memory_mib: Annotated[int, Field(ge=256)] = 1024,
    parallel: Annotated[int, Field(ge=1)] = 4,
) -> float32[samples]:
    r"""1.0 if the response's answer equals the reference mathematically, else 0.0 (Math-Verify).

    The answer is searched for after the response's thinking (``nodes/support/thinking.py``); a response whose
    thinking does not end has no answer. The answer lies between "the final answer is" and "I hope it is
    correct", or in the last ``<answer>`` tag. There it is the last ``\boxed{...}`` (several form one set if
    only ``,``, ``;``, "and" or "or" separate them); else what follows ``####``, else what follows "answer
    is", else the last formula or number, ignoring markdown. Notation does not matter
    (``nodes/reward/answer_text.py``): ``1/2``, ``0.5`` and ``\frac{1}{2}`` are equal, as are ``12\,345`` and
    12345, ``3 1/2`` and 7/2, ``50\%`` and 0.5 or 50, an answer with its unit and without. A decimal with six
    digits or more equals the number that it rounds or truncates. Words of letters are compared as text,
    numerals with their base. An answer that still has to be computed is wrong, so that a policy cannot repeat
    the question: ``12*13`` for 156, ``156/12`` for 13, ``\sqrt{16}`` for 4, ``3x+4x`` for 7x. Such an answer
    is one whose parse tree has more operations than its value and than the reference, which may itself be
    unevaluated (``2^{100}``). If it contains unknowns, only what sympy adds up by itself is recognised:
    ``(x+1)(x-1)`` for ``x^2-1`` is right. A response without an answer scores 0, and so does one that takes
    longer than ``timeout`` or more than ``memory_mib``; the first of these is logged. Records
    ``reward/mean``, and the fractions of such responses as ``reward/unevaluated``, ``reward/unparsed`` and
    ``reward/late``. With a column ``answers``, lists of right answers (``columns: {answers: json}`` of
    data.prompts), any of them counts, and ``answer`` is not read.

    Attributes:
        unevaluated: whether an answer that still has to be computed counts as right if its value is right.
        timeout: seconds that one response may take, above 0.
        memory_mib: address space of the judging process, in MiB, at least 256.
        parallel: responses judged concurrently, at least 1.

    Example:
        rewards: {op: reward.math}
    """
    from rlgraph.nodes.reward.per_sample import record_late  # only a run judges, with threads and logs
    from rlgraph.nodes.reward.verifier import verifier

    pairs = list(zip(responses, alternatives(answer, answers), strict=True))
    verdicts = verifier(parallel, memory_mib * 2**20).judge(pairs, timeout, unevaluated)
    scores = [float(verdict == "right") for verdict in verdicts]
    ctx.record("reward/", scores, kind=SPREAD)
    for kind in ("unevaluated", "unparsed"):
        ctx.record(f"reward/{kind}", [verdict == kind for verdict in verdicts], kind="share")
    record_late(ctx, [verdict == "late" for verdict in verdicts], responses)
    return torch.tensor(scores, dtype=torch.float32)
