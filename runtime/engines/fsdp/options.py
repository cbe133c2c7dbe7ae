"""The options of a model that trains or scores: what its section of a graph says, checked and typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from rlgraph.runtime.engines.fsdp.optimizer import options_of
from rlgraph.syntax.model_settings import Lora, Optimizer

Head = Literal["lm", "value"]
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainOptions:
    """The settings by which a model is loaded, trained and scored with.

    Attributes:
        head: ``lm`` for log-probs, ``value`` for one number per token.
        optimizer: the optimizer and its schedule; None for a frozen model, which has no gradients either.
        seed: of a value head that the model's directory lacks, and of adapters; the same on every rank.
        micro_tokens: tokens of one forward pass, padding included, on a rank or on those that share it.
        score_tokens: the same of passes that score; ``micro_tokens`` if None.
        dtype: ``float32`` or ``bfloat16``, to compute in; a model that trains keeps float32 masters.
        head_dtype: ``float32``, to compute logits in; ``dtype`` if None.
        reshard: free each decoder layer's gathered parameters after use and reduce gradients with every
            micro-batch; if None, only for models of more than ``SMALL`` parameters.
        recompute: run each decoder layer again in the backward pass rather than keep its activations.
        lora: train low-rank adapters alone; all other weights are held in ``dtype``.
        compile: compile the decoder layers (torch.compile); needs a C++ compiler on the CPU.
        packing: lay rows end to end, and read a prompt that they share once, where that is less work and
            the model's attention allows it.
        optimizer_offload: keep float32 masters and AdamW's averages on the host, and step there; the device
            holds weights in ``dtype``. Not with ``lora``.
        activation_offload: keep on the host what ``recompute`` keeps of each layer, its input.
        router_aux_loss_coef, router_bias_update_rate: of a mixture of experts that is not compiled, as
            ``models.NAME.train``; at 0 its routers train by the objective alone.
    """

    head: Head = "lm"
    optimizer: Optimizer | None = None
    seed: int = 0
    micro_tokens: int = 16384
    score_tokens: int | None = None
    dtype: str = "float32"
    head_dtype: str | None = None
    reshard: bool | None = None
    recompute: bool = False
    lora: Lora | None = None
    compile: bool = False
    packing: bool = True
    optimizer_offload: bool = False
    activation_offload: bool = False
    router_aux_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0

    @classmethod
    def read(
        cls,
        *,
        frozen: bool = False,
        optimizer: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Return options whose optimizer and adapter are given as ``models.NAME`` has them.

        Raises:
            ValueError: an unknown or missing option of the optimizer or the adapter.
            TypeError: a setting that does not exist.
        """
        return cls(
            optimizer=None if frozen else options_of(optimizer or {}),
            lora=Lora.model_validate(lora) if lora else None,
            **settings,
        )

    @property
    def is_frozen(self) -> bool:
        return self.optimizer is None

    @property
    def compute(self) -> torch.dtype:
        """Return the data type of gathered parameters."""
        return COMPUTE_DTYPES[self.dtype]

    @property
    def has_wide_head(self) -> bool:
        """Return whether the language-model head computes in a wider type than the rest."""
        return self.head_dtype is not None and self.compute != torch.float32

    @property
    def balances_routers(self) -> bool:
        """Return whether training balances the load of a mixture's experts."""
        sets_balance = self.router_aux_loss_coef != 0 or self.router_bias_update_rate != 0
        return sets_balance and not self.is_frozen
