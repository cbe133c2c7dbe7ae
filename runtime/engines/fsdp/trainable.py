"""The weights of a model that train: their optimizer, its schedule, and one step of both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlgraph.engines.optimizers import OPTIMIZERS
from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW
from rlgraph.runtime.engines.fsdp.load import ShardedModel
from rlgraph.runtime.engines.fsdp.muon import body_matrices
from rlgraph.runtime.engines.fsdp.optimizer import clip_gradients, make_optimizer, set_rate
from rlgraph.runtime.engines.fsdp.options import TrainOptions
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.shards import hold_in
from rlgraph.syntax.model_settings import Optimizer


@dataclass(frozen=True)
class OptimizerStep:
    """The effect of one optimizer step, alike on every rank.

    Attributes:
        gradient_norm: the global L2 norm before clipping.
        rate: the learning rate at which it stepped.
    """

    gradient_norm: float
    rate: float

    @property
    def is_taken(self) -> bool:
        """Return whether weights moved: they stay as they are where a gradient is not finite."""
        return math.isfinite(self.gradient_norm)


class TrainableWeights:
    """The parameters of a model that train, with their optimizer and its schedule.

    Invariants:

    - Every rank holds its shards of the same parameters, in the order of the model.
    - The schedule has made as many steps as the optimizer; a step that is left out counts for neither.
    - Between updates no parameter has a gradient.
    """

    def __init__(
        self, sharded: ShardedModel, options: TrainOptions, settings: Optimizer, ranks: ModelRanks
    ) -> None:
        """Make the optimizer of a model's parameters that take gradients."""
        trained = {name: p for name, p in sharded.model.named_parameters() if p.requires_grad}
        matrices = {}
        if OPTIMIZERS[settings.kind].orthogonalises:
            matrices = body_matrices(sharded.model, sharded.layers, sharded.views)
        self.ranks = ranks
        self.max_norm = settings.max_grad_norm
        self.parameters = [*trained.values()]
        self.shares = sharded.layer_parts.shares(trained)
        self.optimizer, self.scheduler = make_optimizer(
            self.parameters,
            settings,
            matrices,
            ranks.copy_group,
            options.compute,
            on_host=options.optimizer_offload,
        )
        needs_cast = any(p.dtype != options.compute for p in self.parameters)
        if options.optimizer_offload and needs_cast:
            hold_in(sharded.model, sharded.shards, options.compute)

    def step(self) -> OptimizerStep:
        """Clip the gradients, and step unless one is not finite. Collective."""
        norm = clip_gradients(
            self.parameters, self.max_norm, self.ranks.group, self.ranks.replicas, self.shares
        )
        step = OptimizerStep(norm, float(self.scheduler.get_last_lr()[0]))
        if step.is_taken:
            self.optimizer.step()
            self.scheduler.step()
        return step

    def drop_gradients(self) -> None:
        """Free the gradients of all parameters."""
        self.optimizer.zero_grad(set_to_none=True)

    def set_rate(self, rate: float) -> None:
        """Change the learning rate, at its peak: a warm-up goes on from there."""
        set_rate(self.scheduler, rate)

    def publish(self) -> None:
        """Bring masters on the host that something else than a step has changed to the device."""
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.publish()
