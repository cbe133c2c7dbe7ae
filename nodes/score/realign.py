"""Columns that were scored on other tokens, laid along the ones that are trained."""

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import op
from rlgraph.ops.column_types import boolean, float32, int64, other_tokens, samples, tokens


@op()
def realign(
    values: float32[samples, other_tokens],
    values_mask: boolean[samples, other_tokens],
    values_tokens: int64[samples, other_tokens] | None,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
) -> float32[samples, tokens]:
    """Values of the same text in other tokens: those in the mask there move to the loss mask here.

    The value at the j-th token of ``values_mask`` in a row moves to the j-th token of ``loss_mask``, for
    example when a policy is shown a hint before its own response (arXiv 2601.20802, 2601.19897); 0 elsewhere.
    To move a part other than the response, map both masks. A ``ValueError`` names the first row whose masks
    differ in their number of tokens or, with ``values_tokens``, in the tokens themselves.

    Example:
        teacher_here: {op: realign, in: {values: teacher_logprobs, values_mask: hinted_mask}}
    """
    counts, wanted = values_mask.sum(), loss_mask.sum()
    wrong = counts != wanted
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"row {row}: {counts[row]} tokens are realigned to {wanted[row]}")
    target_mask, source_mask = loss_mask.values, values_mask.values
    if values_tokens is not None:
        unlike = values_tokens.values[source_mask] != tokens.values[target_mask]
        if unlike.any():
            row = int(loss_mask.row_of[target_mask][unlike][0])
            raise ValueError(f"row {row}: the tokens that are realigned are not the same in both")
    out = torch.zeros(len(target_mask), dtype=values.values.dtype, device=target_mask.device)
    out[target_mask] = values.values[source_mask]
    return tokens.like(out)
