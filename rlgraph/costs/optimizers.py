"""The cost of optimizers: averages on a device, and what a step takes beyond AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlgraph.costs import muon
from rlgraph.costs.efficiency import Rates
from rlgraph.costs.lora_size import trained_on_device
from rlgraph.costs.model_size import Size
from rlgraph.engines.optimizers import AVERAGES, OPTIMIZERS, OptimizerKind
from rlgraph.ir.plan import ModelPlan


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step beyond one of AdamW, on each device that has a shard of the model.

    Attributes:
        seconds: how much longer it takes.
        bytes: what it sends to other devices.
        memory: the most bytes of a device that it takes while it runs, from the width of the numbers that
            it computes with in bytes, and the devices that share a copy.
    """

    seconds: Callable[[Size, Rates], float]
    bytes: Callable[[Size, Rates], float]
    memory: Callable[[Size, int, int], int]


# of the optimizers whose step differs from AdamW's, which the formulas of an update count
STEP_COSTS = {"muon": StepCost(muon.step_seconds, muon.step_bytes, muon.memory_of_step)}


def optimizer_of(model: ModelPlan) -> OptimizerKind | None:
    """Return the optimizer that steps a model's weights; None of a frozen one."""
    if model.optimizer is None or model.frozen:
        return None
    return OPTIMIZERS[model.optimizer.kind]


def extra_step_cost(model: ModelPlan) -> StepCost | None:
    """Return what the optimizer's step of a model takes beyond AdamW's; None where that is nothing."""
    if model.optimizer is None or model.frozen:
        return None
    return STEP_COSTS.get(model.optimizer.kind)


def may_step_on_host(model: ModelPlan) -> bool:
    """Return whether a model's optimizer can be on the host: one that may, and of whole weights."""
    optimizer = optimizer_of(model)
    if optimizer is None:
        return False
    if model.train is None or model.train.lora is not None:
        return False
    return optimizer.may_be_on_host


def averages_on_device(size: Size, model: ModelPlan, devices: int) -> int:
    """Return the numbers of a gradient's averages on each of so many devices."""
    averages = AVERAGES * trained_on_device(size, model, devices)
    optimizer = optimizer_of(model)
    if optimizer is None or not optimizer.orthogonalises:
        return averages
    spared_per_weight = AVERAGES - optimizer.averages_per_matrix_weight
    return averages - spared_per_weight * muon.matrices_on_device(size, devices)
