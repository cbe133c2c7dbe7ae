"""The price of Muon (arXiv 2502.16982): averages that it keeps, and matrices that it orthogonalises.

The matrices of the decoder layers go in rounds, the largest first, of one for each device that has a shard:
see runtime/engines/fsdp/muon.py. A mixture's experts need no round: each device has some of them whole.
"""

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER
from rlgraph.costs.model_size import Size, padded

if TYPE_CHECKING:
    from rlgraph.costs.efficiency import Rates

ITERATIONS = 5  # of Newton-Schulz
MatrixShape = tuple[int, int]


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
    matrices: list[MatrixShape] = []
    for layer in _layers(size):
        matrices += [tensor for tensor in layer.tensors.elements() if min(tensor) > 1]
    return padded(matrices, devices) // devices


def step_seconds(size: Size, rates: "Rates") -> float:
    """Return how much longer than AdamW's an optimizer step takes, in which matrices travel by all-to-alls.

    A matrix is averaged by some 5 kernels, and orthogonalised by 20; one average less is read and written.
    """
    matrices, experts = exchanged(size), experts_on_device(size, rates.devices)
    rounds = matrices[:: rates.devices]
    flops = sum(newton_schulz_flops(shape) for shape in rounds)
    flops += sum(count * newton_schulz_flops(shape) for shape, count in experts)
    launches = rates.launch(len(rounds) + len(experts) + (len(matrices) + len(experts)) / 4)
    saved = 2 * MASTER * matrices_on_device(size, rates.devices) / rates.memory
    arithmetic = flops / rates.flops(rates.efficiency.update)
    return max(arithmetic, launches) + rates.traded(step_bytes(size, rates)) - saved


def step_bytes(size: Size, rates: "Rates") -> float:
    """Return the bytes of the all-to-alls of a step.

    A device receives one whole matrix per round, and its rows of all matrices.
    """
    matrices = exchanged(size)
    rows = sum(height * width for height, width in matrices) / rates.devices
    whole = sum(height * width for height, width in matrices[:: rates.devices])
    return (whole + rows) * rates.away * rates.width


def memory_of_step(size: Size, width: int, devices: int) -> int:
    """Return the most bytes that orthogonalising takes, of a round or of a batch of experts.

    Numbers have ``width`` bytes. An iteration holds its matrix before and after, and two products of the
    shorter side. Before the first iteration there are averages in float32: for a round, this device's rows.
    """
    largest, *_ = exchanged(size)
    nbytes = [_orthogonalising_bytes(largest, width, MASTER // devices + width)]
    for shape, count in experts_on_device(size, devices):
        cast_width = width if width < MASTER else 0
        of_one = _orthogonalising_bytes(shape, width, MASTER + cast_width)
        nbytes.append(min(count, batch_of_experts(shape)) * of_one)
    return max(nbytes)


def _orthogonalising_bytes(shape: MatrixShape, width: int, averages_width: int) -> int:
    numbers, short = shape[0] * shape[1], min(shape)
    return max(width * 2 * (numbers + short**2), averages_width * numbers)


def batch_of_experts(shape: MatrixShape) -> int:
    """Return how many matrices of experts are orthogonalised at a time."""
    return max(1, limits.BUCKET // (MASTER * shape[0] * shape[1]))


@lru_cache(maxsize=64)
def exchanged(size: Size) -> list[MatrixShape]:
    """Return the shapes of the matrices that travel to be orthogonalised, the largest work first."""
    shapes: list[MatrixShape] = []
    for layer in _layers(size):
        not_fused = layer.weights & layer.tensors
        shapes += [shape for shape in not_fused.elements() if min(shape) > 1]
    return sorted(shapes, key=newton_schulz_flops, reverse=True)


@lru_cache(maxsize=1024)
def experts_on_device(size: Size, devices: int) -> list[tuple[MatrixShape, int]]:
    """Return for each layer the shapes of its experts' matrices, and how many of them a device has."""
    experts = []
    for layer in _layers(size):
        for shape, count in (layer.weights - layer.tensors).items():
            experts.append((shape, -(-count // devices)))
    return experts


class _Matrices(NamedTuple):
    """The tensors of a decoder layer that have matrices, and the matrices in them; see ``Config``."""

    tensors: Counter[MatrixShape]  # as they are sharded
    weights: Counter[MatrixShape]


@lru_cache(maxsize=64)
def _layers(size: Size) -> list[_Matrices]:
    config, layers = size.config, []
    for index in range(config.num_hidden_layers):
        no_matrices = Counter(config.no_matrices(index))
        tensors = Counter(config.tensors(index)) - no_matrices
        weights = Counter(config.unfused(index)) - no_matrices
        layers.append(_Matrices(tensors, weights))
    return layers
