"""Muon: averages of gradients, orthogonalised by matrix (Jordan et al., 2024; at scale, arXiv 2502.16982).

The rows of a matrix lie on the ranks of a copy, and its orthogonalisation wants all of them. Matrices go in
rounds, the largest first, of as many as there are ranks. Each rank gets one whole by an all-to-all,
orthogonalises it, and another all-to-all brings rows back::

    rank 0    rows 0 of A and B          A    ->  A orthogonal          rows 0 of both
    rank 1    rows 1 of A and B    ->    B    ->  B orthogonal    ->    rows 1 of both

So no rank holds more than one matrix whole, and none is orthogonalised twice, but by another replica. The
experts of a mixture are sharded by whole matrices, and stay where they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from rlgraph.costs.muon import ITERATIONS, MatrixShape, batch_of_experts, newton_schulz_flops
from rlgraph.runtime.engines.fsdp.shards import local
from rlgraph.runtime.engines.weights.extents import rows_of
from rlgraph.runtime.engines.weights.naming import WeightViews
from rlgraph.syntax.model_settings import Optimizer

# Jordan's coefficients: they take singular values between 0.7 and 1.2 in five iterations, not to 1
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPSILON = 1e-7  # the least norm that a matrix is divided by
RMS = 0.2  # of a step in its numbers, about AdamW's, at a learning rate of 1


def body_matrices(
    model: torch.nn.Module, layers: Iterable[torch.nn.Module], views: WeightViews
) -> dict[Parameter, MatrixShape]:
    """Return the parameters of the decoder layers that hold matrices, with the shape of each matrix.

    A fused parameter of experts has as many matrices as weights in the checkpoint: gate and up are two, but
    where they are one there too. Biases of experts, a row for each, are no matrix.
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    shapes = {}
    for name, p in model.named_parameters():
        is_trained_here = p.requires_grad and id(p) in inside
        if not is_trained_here or name.endswith("bias") or p.dim() not in (2, 3):
            continue
        rows, columns = p.shape[-2:]
        if min(rows, columns) == 1:
            continue
        if p.dim() == 3:
            stored = {weight.shape for weight in views.get(name, ()) if len(weight.shape) == 2}
            if len(stored) == 1:
                stored_rows, stored_columns = stored.pop()
                if stored_columns == columns:
                    rows = stored_rows
        shapes[p] = (rows, columns)
    return shapes


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices ``[count, rows, columns]`` with all singular values near 1, by Newton-Schulz iterations
    in their own data type. The memory of those that are given is overwritten.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    del matrices
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON))
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model, and AdamW, which steps with it, for all other parameters.

    With B <- m B + (1 - m) G and O the orthogonal part of (1 - m) G + m B (Nesterov), a matrix W
    ``[rows, columns]`` becomes (1 - lr decay) W - 0.2 lr sqrt(max(rows, columns)) O.

    Args:
        shapes: the parameters with matrices, and the shape of each of their matrices.
        rest: steps the others; its groups and its state are this optimizer's too.
        options: lr, decay (``weight_decay``) and m (``momentum``).
        group: the ranks over which parameters are sharded by rows.
        dtype: that matrices travel and are orthogonalised in.
    """

    def __init__(
        self,
        shapes: Mapping[Parameter, MatrixShape],
        rest: torch.optim.Optimizer,
        options: Optimizer,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__([*shapes], options.model_dump(include={"lr", "weight_decay", "momentum"}))
        self.shapes = shapes
        self.rest = rest
        self.group = group
        self.dtype = dtype
        rest.state = self.state
        self.param_groups += rest.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # gradients are there already
        """Step every parameter that has a gradient. Collective."""
        self.rest.step()
        trained = [p for p in self.shapes if p.grad is not None]
        for p in trained:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        matrices = [p for p in trained if p.dim() == 2]
        together = sorted(matrices, key=lambda p: newton_schulz_flops(self.shapes[p]), reverse=True)
        for start in range(0, len(together), self.group.size()):
            self._round(together[start : start + self.group.size()])
        for p in trained:
            if p.dim() == 3:
                self._experts(p)

    def _round(self, matrices: Sequence[Parameter]) -> None:
        """Step matrices of which each rank of the group orthogonalises one at most."""
        rank = self.group.rank()
        ranks = self.group.size()
        sizes = [local(p).numel() for p in matrices]
        out = sizes + [0] * (ranks - len(sizes))
        back = [0] * ranks
        shape = (0, 1, 1)
        if rank < len(matrices):
            height, width = self.shapes[matrices[rank]]
            spans = [rows_of(height, other_rank, ranks) for other_rank in range(ranks)]
            back = [(end_row - start_row) * width for start_row, end_row in spans]
            shape = (1, height, width)
        # what has no name is freed on the way
        orthogonal_matrix = orthogonal(
            self._exchanged(self._rows(matrices, sizes), out, back).view(shape)
        ).flatten()
        rows = self._exchanged(orthogonal_matrix, back, out)
        for own_rows, p in zip(rows.split(sizes), matrices, strict=True):
            self._apply(p, ..., own_rows.view_as(local(p)))

    def _rows(self, matrices: Sequence[Parameter], sizes: list[int]) -> torch.Tensor:
        """Return this rank's rows of averages that are brought up to date, end to end."""
        rows = torch.empty(sum(sizes), dtype=self.dtype, device=local(matrices[0]).device)
        for room, p in zip(rows.split(sizes), matrices, strict=True):
            room.copy_(self._averaged(p, ...).flatten())
        return rows

    def _exchanged(self, numbers: torch.Tensor, out: list[int], back: list[int]) -> torch.Tensor:
        """Return what an all-to-all brings, for so many numbers to and from each rank."""
        if self.group.size() == 1:
            return numbers
        received = numbers.new_empty(sum(back))
        dist.all_to_all_single(received, numbers, back, out, group=self.group)
        return received

    def _experts(self, p: Parameter) -> None:
        """Step the matrices of a fused parameter that this rank has, as many at a time as memory allows."""
        count = len(self._own_part(p, p))
        most = batch_of_experts(self.shapes[p])
        for start in range(0, count, most):
            batch = slice(start, start + most)
            self._apply(p, batch, orthogonal(self._averaged(p, batch).to(self.dtype)))

    def _averaged(self, p: Parameter, batch: Any) -> torch.Tensor:
        """Return an average that is brought up to date, of some of the matrices of this rank's part."""
        assert p.grad is not None
        gradient = self._own_part(p, p.grad)[batch]
        momentum = self._own_part(p, self.state[p]["momentum_buffer"])[batch]
        share = self.param_groups[0]["momentum"]
        momentum.lerp_(gradient, 1 - share)
        return gradient.lerp(momentum, share)

    def _apply(self, p: Parameter, batch: Any, step: torch.Tensor) -> None:
        """Move some of the matrices of this rank's part by an orthogonal step."""
        rate, decay = (self.param_groups[0][key] for key in ("lr", "weight_decay"))
        scale = RMS * max(self.shapes[p]) ** 0.5
        self._own_part(p, p)[batch].mul_(1 - rate * decay).add_(step, alpha=-rate * scale)

    def _own_part(self, p: Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, or of what is like it: ``[rows, columns]``; of experts
        ``[count, rows, columns]``."""
        return local(tensor).view(-1, *self.shapes[p]) if p.dim() == 3 else local(tensor)
