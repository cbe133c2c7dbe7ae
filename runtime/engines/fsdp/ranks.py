"""The ranks that share a model's weights, rows and layers with this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup
from rlgraph.runtime.engines.sequence.groups import ALONE, RowGroup, SequenceGroup


@dataclass(frozen=True)
class ModelRanks:
    """The groups of ranks that one model trains or scores on, as one of them sees them.

    A copy of the model is sharded over ``copy_group``, times the ranks of ``tensor``; ``group`` holds one or
    several copies, which are replicas of each other.

    Attributes:
        mesh: one dimension, or two, ``replicate`` and ``shard``: copies of the model, each sharded over a row
            of ranks. Where layers are divided it has the ranks with the same part.
        group: all ranks that the model is on.
        sequence: the ranks that share the tokens of their rows.
        tensor: the ranks that each have a part of every decoder layer, and the same rows.
        experts: the ranks that each have some of a mixture's experts, out of those of one copy.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    sequence: SequenceGroup = ALONE
    tensor: RowGroup = ALONE
    experts: ExpertGroup = field(default_factory=ExpertGroup)

    @cached_property
    def copy_group(self) -> dist.ProcessGroup:
        """Return the ranks that share one copy, or one part of its layers."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicas(self) -> int:
        """Return how many copies of the model there are."""
        return self.group.size() // self._ranks_per_copy

    @property
    def is_in_first_copy(self) -> bool:
        return self.group.rank() < self._ranks_per_copy

    @property
    def same_rows(self) -> RowGroup:
        """Return the ranks that have the same rows in a call."""
        return self.tensor if self.tensor.group else self.sequence

    @property
    def _ranks_per_copy(self) -> int:
        return self.copy_group.size() * self.tensor.ranks
