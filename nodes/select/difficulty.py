"""Difficulty of questions, as the policy meets them, kept from iteration to iteration: a curriculum.

iteration k    prompts ─> wanted (reads) ─> rollout ─> rewards ─> solved ─> difficulty (keeps)
                             ^                                                 │
iteration k+1                └─────────────── its state ───────────────────────┘
"""

import hashlib
from typing import Annotated

from pydantic import Field

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.splitmix import text_key
from rlgraph.ops import Context, boolean, float32, op, prompts, text

Rate = Annotated[float, Field(ge=0, le=1)]


@op(rows="all", state="keeps")
def difficulty(
    ctx: Context, question: text[prompts], solved: float32[prompts], *, decay: Rate = 0.5
) -> float32[prompts]:
    """Each question's share of solved samples, over the iterations that have tried it.

    r <- decay r + (1 - decay) ``solved``, and r = ``solved`` the first time, where r is the value that is
    kept. A question is identified by its text. Records ``known``, how many questions have been tried.

    Attributes:
        decay: how much of the old value is kept when a question is tried again, 0 to 1.

    Example:
        difficulty: {op: difficulty, in: {solved: solved}}
    """
    rates = ctx.state
    for key, share in zip(map(text_key, question), solved.tolist(), strict=True):
        if key in rates:
            rates[key] = decay * rates[key] + (1 - decay) * share
        else:
            rates[key] = share
    ctx.record("known", len(rates), over="iterations")
    return torch.tensor([rates[text_key(asked_question)] for asked_question in question])


@op(filters=True, state="reads")
def within(
    ctx: Context, question: text[prompts], *, min: Rate = 0.0, max: Rate = 1.0, explore: Rate = 0.0
) -> boolean[prompts]:
    """Keep the questions that are neither too hard nor too easy, and those not tried yet.

    Online difficulty filtering (arXiv 2504.03380) by the results of earlier iterations, before anything is
    generated: min <= r <= max, where r is the value that ``difficulty`` keeps for the question. A share
    ``explore`` of the other questions is kept too, drawn from (seed, iteration, question), so that progress
    of the policy on them is noticed. Records ``kept``, the fraction of questions that are kept.

    Attributes:
        min: the smallest share of solved samples, 0 to 1.
        max: the largest share of solved samples, 0 to 1.
        explore: the share of the other questions to keep, 0 to 1.

    Example:
        difficulty: {op: difficulty}
        wanted: {op: filter.difficulty, state: difficulty, min: 0.1, max: 0.9, explore: 0.1, refill: true}
    """
    is_kept = []
    for asked_question in question:
        rate = ctx.state.get(text_key(asked_question))
        is_wanted = rate is None or min <= rate <= max
        is_kept.append(is_wanted or _uniform_number(ctx, asked_question) < explore)
    ctx.record("kept", is_kept, kind="share")
    return torch.tensor(is_kept, dtype=torch.bool)


def _uniform_number(ctx: Context, question: str) -> float:
    """Return a number from 0 to 1 that depends on the seed, the iteration and the question."""
    text = f"{ctx.seed} {ctx.iteration} {question}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
