"""The optimizers: what each keeps for a weight, what it excludes, and where it may step.

An optimizer is a record here, its cost in `rlgraph.costs.optimizers` where it differs from AdamW's, and what
makes it in a train engine, which refuses to start without. No other file compares an optimizer's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from rlgraph.records import dataclass

AVERAGES = 2  # numbers that AdamW keeps for each weight: averages of its gradient and of the square


@dataclass(frozen=True)
class OptimizerKind:
    """A way to step weights by their gradients.

    Attributes:
        averages: how an error about another optimizer's setting says by what this one averages gradients.
        averages_per_matrix_weight: numbers that it keeps for each weight of the decoder layers' matrices; of
            other weights it keeps ``AVERAGES``.
        orthogonalises: whether it steps the decoder layers' matrices by orthogonal matrices; AdamW steps the
            other weights. Each such matrix is brought together on one device for a step.
        may_be_on_host: whether it can step in host memory (``train.optimizer_offload``).
        settings: keys of ``models.NAME.optimizer`` that no other optimizer reads.
        excludes: keys of ``models.NAME.train`` that it does not go with: what of it is against the key, and
            what the key does.
        plan_note: what a plan says of a model that it trains; nothing of the default.
    """

    averages: str
    averages_per_matrix_weight: int = AVERAGES
    orthogonalises: bool = False
    may_be_on_host: bool = False
    settings: tuple[str, ...] = ()
    excludes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    plan_note: str = ""


DEFAULT_OPTIMIZER: str = "adamw"
OPTIMIZERS = {
    DEFAULT_OPTIMIZER: OptimizerKind("whose averages have `betas`", may_be_on_host=True),
    "muon": OptimizerKind(
        "whose average of a matrix's gradient has `momentum`",
        averages_per_matrix_weight=1,
        orthogonalises=True,
        settings=("momentum",),
        excludes={
            "lora": (
                "steps are orthogonal matrices",
                "trains two factors of a matrix, whose product takes no such step",
            ),
            "optimizer_offload": ("matrices are orthogonalised on devices", "puts AdamW on the host"),
            "tensor_parallel": ("matrices are orthogonalised whole", "leaves a device parts of them"),
        },
        plan_note=" by muon",
    ),
}
