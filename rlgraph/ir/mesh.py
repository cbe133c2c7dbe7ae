"""The layout of a train engine's model on the devices of its pool: in one copy, or in several replicas."""

from rlgraph.records import dataclass

# settings by which devices share a model or a row, as one device has them: they decide no number of a run
ON_ONE_DEVICE = {"shard": None, "sequence_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1}


@dataclass(frozen=True)
class Mesh:
    """``replicate`` copies of a model, each sharded over ``shard`` consecutive devices: hybrid sharding
    (PyTorch FSDP, arXiv 2304.11277).

    Weights are gathered, and gradients reduced, among the devices of a copy. Gradients are then summed among
    devices that hold the same shard. Of 2 replicas over 4 devices each:

        replica 0      0 1 2 3
        replica 1      4 5 6 7      devices 1 and 5 hold the same shard

    Where each layer is divided in ``tensor`` parts, a copy is over ``shard`` x ``tensor`` devices. Those of a
    row hold all parts between them, and those of a column the shards of one part:

        shard 0        0 1
        shard 1        2 3          devices 0 and 2 hold the same part: 2-way shard x 2-way tensor

    Where a mixture's experts are divided among ``experts`` consecutive devices of a copy, each has some of
    them, sharded over the devices of the copy that have the same. Everything else is sharded over all of it.
    """

    replicate: int
    shard: int
    tensor: int = 1
    experts: int = 1

    @property
    def parts(self) -> int:
        """Return in how many parts devices hold what is divided: layers, or experts."""
        return self.tensor * self.experts

    def __str__(self) -> str:
        if self.tensor > 1:
            return f"{self.shard}-way shard x {self.tensor}-way tensor"
        if self.experts == 1:
            return f"{self.shard}-way shard x {self.replicate} replicas"
        copies = f" x {self.replicate} replicas" if self.replicate > 1 else ""
        return f"{self.shard}-way shard{copies}, {self.experts}-way experts"
