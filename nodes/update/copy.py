"""An op that copies a model's weights onto one that does not train: a reference that follows the policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.ops import TrainEngine, op


@op(updates=True, head="any")
def copy(model: TrainEngine, of: TrainEngine, *, mix: Annotated[float, Field(gt=0, le=1)] = 1.0) -> None:
    """Copy a model's weights onto a frozen one of the same shape; writes the next version of that.

    W_ref <- (1 - mix) W_ref + mix W_policy, for every weight, in the data type of the frozen model; adapters
    of the policy are merged into what is copied. With a reference that is renewed like this the KL term does
    not hold the policy where it began (TR-DPO, arXiv 2404.09656: hard with ``mix: 1``, soft below). It is
    part of checkpoints from then on. ``of: policy@next`` copies what the iteration's update makes.

    Attributes:
        mix: how much of the copied weights is in the new ones, above 0 and at most 1.

    Example:
        refresh: {op: update.copy, model: ref, of: policy, every: 50}
    """
    model.copy(of, mix)
