"""An op that shows the policy a hint: what it writes is along tokens of its own."""

from typing import NamedTuple

from rlgraph.ops import boolean, int64, op, other_tokens, samples, tokens


class Hinted(NamedTuple):
    hinted: int64[samples, tokens]
    hinted_mask: boolean[samples, tokens]


@op()
def hint(tokens: int64[samples, other_tokens], loss_mask: boolean[samples, other_tokens]) -> Hinted:
    return Hinted(tokens, loss_mask)
