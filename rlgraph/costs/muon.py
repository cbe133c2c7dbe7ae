"""The price of Muon (arXiv 2502.16982): averages that it keeps, and matrices that it orthogonalises.

The matrices of the decoder layers go in rounds, the largest first, of one for each device that has a shard:
see runtime/engines/fsdp/muon.py. A mixture's experts need no round: each device has some of them whole.
"""

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER
from rlgraph.costs.lora_size import trained_on_device
from rlgraph.costs.model_size import Size, padded
from rlgraph.ir.plan import ModelPlan

if TYPE_CHECKING:
    from rlgraph.costs.efficiency import Rates

ITERATIONS = 5  # of Newton-Schulz
MatrixShape = tuple[int, int]


def steps_by_muon(model: ModelPlan) -> bool:
    return bool(model.optimizer and model.optimizer.kind == "muon" and not model.frozen)


def may_step_on_host(model: ModelPlan) -> bool:
    """Return whether an optimizer can be on the host: AdamW, of whole weights."""
    adapted = model.train is None or model.train.lora is not None
    return bool(model.optimizer and model.optimizer.kind == "adamw") and not (model.frozen or adapted)


def averages_on_device(size: Size, model: ModelPlan, devices: int) -> int:
    """Return the numbers of a gradient's averages on each of so many devices: AdamW has two for a weight,
    Muon one for a matrix."""
    trained = trained_on_device(size, model, devices)
    return 2 * trained - (matrices_on_device(size, devices) if steps_by_muon(model) else 0)


def newton_schulz_flops(shape: MatrixShape) -> int:
    """Return the operations of one matrix: X X', its square, and their product with X, in each iteration.

    Example:
        >>> newton_schulz_flops((2, 3)) == 5 * (4 * 2 * 2 * 3 + 2 * 2**3)
        True
    """
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


@lru_cache(maxsize=1024)  # a search asks it of every plan
def matrices_on_device(size: Size, devices: int) -> int:
    """Return the numbers of the decoder layers' matrices on each of so many devices: whole rows of each."""
    matrices = (tensor for layer in _layers(size) for tensor in layer.tensors.elements() if min(tensor) > 1)
    return padded(matrices, devices) // devices


def step_seconds(size: Size, rates: "Rates") -> float:
    """Return how much longer than AdamW's an optimizer step takes, in which matrices travel by all-to-alls.

    A matrix is averaged by some 5 kernels, and orthogonalised by 20; one average less is read and written.
    """
    together, experts = exchanged(size), experts_on_device(size, rates.devices)
    rounds = together[:: rates.devices]
    work = sum(map(newton_schulz_flops, rounds))
    work += sum(count * newton_schulz_flops(shape) for shape, count in experts)
    launched = rates.launch(len(rounds) + len(experts) + (len(together) + len(experts)) / 4)
    spared = 2 * MASTER * matrices_on_device(size, rates.devices) / rates.memory
    arithmetic = work / rates.flops(rates.efficiency.update)
    return max(arithmetic, launched) + rates.traded(step_bytes(size, rates)) - spared


def step_bytes(size: Size, rates: "Rates") -> float:
    """Return the bytes of the all-to-alls of a step: of each round a whole matrix, and a device's rows of
    all."""
    together = exchanged(size)
    rows = sum(height * width for height, width in together) / rates.devices
    whole = sum(height * width for height, width in together[:: rates.devices])
    return (whole + rows) * rates.away * rates.width


def held_in_step(size: Size, width: int, devices: int) -> int:
    """Return the most bytes that orthogonalising takes, in numbers of ``width`` bytes: a round's, or those of
    a batch of experts.

    An iteration holds its matrix before and after, and two products of the shorter side. Before the first
    there are averages in float32, of a round this device's rows.
    """
    largest = exchanged(size)[0]
    held = [_held(largest, width, MASTER // devices + width)]
    for shape, count in experts_on_device(size, devices):
        one = _held(shape, width, MASTER + width * (width < MASTER))
        held.append(min(count, batch_of_experts(shape)) * one)
    return max(held)


def _held(shape: MatrixShape, width: int, before: int) -> int:
    numbers, short = shape[0] * shape[1], min(shape)
    return max(width * 2 * (numbers + short**2), before * numbers)


def batch_of_experts(shape: MatrixShape) -> int:
    """Return how many matrices of experts are orthogonalised at a time."""
    return max(1, limits.BUCKET // (MASTER * shape[0] * shape[1]))


@lru_cache(maxsize=64)
def exchanged(size: Size) -> list[MatrixShape]:
    """Return the shapes of the matrices that travel to be orthogonalised, the largest work first."""
    shapes = (shape for layer in _layers(size) for shape in (layer.weights & layer.tensors).elements())
    return sorted((shape for shape in shapes if min(shape) > 1), key=newton_schulz_flops, reverse=True)


@lru_cache(maxsize=1024)
def experts_on_device(size: Size, devices: int) -> list[tuple[MatrixShape, int]]:
    """Return of each layer the shapes of its experts' matrices, and how many of them a device has."""
    kinds = (kind for layer in _layers(size) for kind in (layer.weights - layer.tensors).items())
    return [(shape, -(-count // devices)) for shape, count in kinds]


class _Matrices(NamedTuple):
    """The tensors of a decoder layer that have matrices, as they are sharded, and these; see ``Config``."""

    tensors: Counter[MatrixShape]
    weights: Counter[MatrixShape]


@lru_cache(maxsize=64)
def _layers(size: Size) -> list[_Matrices]:
    config, layers = size.config, []
    for index in range(config.num_hidden_layers):
        others = Counter(config.no_matrices(index))
        both = (Counter(shapes) - others for shapes in (config.tensors(index), config.unfused(index)))
        layers.append(_Matrices(*both))
    return layers
