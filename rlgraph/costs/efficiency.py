"""The constants of the cost model, each a range (worst, best) with where it comes from, and the rates of a
device that follow.

Where others have published what a decode step or an optimizer step takes alone, the ranges hold it (``alone``
in benchmarks/published.yaml). None is fitted to a whole run in docs/cost_model.md. ``facts`` are those that
the page lists. A *grade* picks an end of each range: ``WORST`` gives the longest time, ``BEST`` the shortest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlgraph.costs.dtypes import WIDTH
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.model_size import Size

WORST, BEST = 0, 1
Range = tuple[float, float]  # (worst, best)


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies: the shares of a device's peak that are reached, and times that no peak explains."""

    # The products of forward and backward, without what passes through memory between them (``activations``).
    # Llama 3 reached 0.38 to 0.43 of the peak with that (arXiv 2407.21783, table 4), torchtitan 0.33 to 0.39.
    update: Range = (0.35, 0.58)
    # The products of a pass without gradients reach less: an update that computes activations again takes 1.9
    # to 3.3 times as long, not 4 (facts). This is the product of both ranges, which vary independently, so
    # that the squares of the logarithms of their widths add.
    score: Range = (0.19, 0.41)
    # Prefill: large products as in an update, with no backward pass (sgl-project/sglang#5839: 10,000 tokens).
    prefill: Range = (0.4, 0.7)
    # How often activations pass through memory: once where kernels are fused, more often where norms,
    # rotations and gates are kernels of their own (assumed).
    activations: Range = (1.7, 1.0)
    # Decoding's products, in whole tiles of rows: H20s reached 0.63 to 0.71 of their peak with one row, with
    # models of 1.7B to 32B (Qwen's table: QwenLM/Qwen3, speed_benchmark.md).
    decode: Range = (0.5, 0.75)
    # Rows in a tile of a kernel that multiplies: 64 in a Hopper GPU's instruction. Products of experts are
    # tuned to 16, and take 64 by default (vLLM, SGLang: fused_moe and its configurations).
    tile: Range = (64, 64)
    expert_tile: Range = (64, 16)  # of more rows than there are experts; else 16
    # Memory bandwidth: a decode step of Qwen3-30B-A3B has read weights and cache at 0.75 of an H20's, and at
    # 0.8 of an H100's or more (sgl-project/sglang#5839, vllm-project/vllm#23151).
    memory: Range = (0.6, 0.9)
    # Links: NCCL reaches 0.8 of a link with large messages, half with small ones (assumed).
    link: Range = (0.4, 0.8)
    # The share of the time that gathers and reductions could hide behind compute in which they do not: an
    # optimizer step of Llama 3.1 8B takes 3 % longer on 128 H100s than on 8, though its weights then pass
    # adapters (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). Smaller passes hide less (assumed).
    exposed: Range = (0.5, 0.0)
    # Seconds in which the kernels of a layer are launched from Python: 0.6 ms with Transformers on hosts of
    # H20s, with six models of 0.6B to 32B (Qwen's table). Seconds of a decode step beside that (assumed).
    decode_layer: Range = (8e-4, 4e-4)
    decode_step: Range = (5e-3, 1e-3)
    # The same where CUDA graphs launch kernels. With one row it was 72 microseconds per layer on H20s with
    # SGLang 0.4.6 (Qwen's table, 0.6B), and 40 on an H200 with vLLM 0.17 (cloudrift-ai/emmy#822).
    graph_layer: Range = (8e-5, 3.5e-5)
    graph_step: Range = (1e-3, 3e-4)
    # Seconds per decode step and row, whose token is drawn, noted and sent on: vLLM 0.5.3 spent 62 % of its
    # time so with some hundred rows of an 8B on an H100, 0.6 a third as much (blog.vllm.ai, 2024-09-05).
    decode_row: Range = (5e-5, 1e-5)
    # Seconds of one small all-reduce in a tensor-parallel group, beside its bytes (assumed).
    reduction: Range = (3e-5, 1.2e-5)
    # Numbers per second that a worker steps on its host, by AdamW and a cast: one thread has done 2.4e8. With
    # workers that contend for the host's memory it is less, with several threads each more (assumed).
    host_step: Range = (1e8, 5e8)
    # Bytes per second of a GPU's memory that a server maps, or unmaps: 51.6 GiB have taken 1.5 s (facts), at
    # best a quarter of that (assumed).
    mapped: Range = (3.7e10, 1.5e11)
    # Bytes of weights per second in which one thread finds what has changed: 0.95e9 was measured
    # (benchmarks/results/2026-11-26.md), half and twice that are assumed.
    changes: Range = (0.5e9, 2e9)
    # Columns travel through the host: copies, and Ray's object store (assumed), bytes per second.
    objects: Range = (0.5e9, 4e9)
    # Seconds per step of driver and worker; best measured, 1 to 2 ms (benchmarks/results/2026-11-20.md).
    step: Range = (2e-2, 1e-3)
    # Seconds between two rounds of a region that streams, in which its pool waits for the driver: 8 to 12 ms
    # (benchmarks/results/2026-11-26.md), half and twice of that at best and at worst.
    round: Range = (2e-2, 5e-3)
    # Seconds per row of an op on the CPU, with text (a reward, a data source) and without (assumed).
    text_row: Range = (5e-3, 1e-5)
    row: Range = (2e-4, 1e-6)


ASSUMED = Efficiency()


@dataclass(frozen=True)
class Rates:
    """The rates that one device of ``devices`` reaches in a data type, at one grade of the efficiencies.

    Those are the devices that share the shards of one copy of a model; there are ``replicas`` of it.
    """

    cluster: Cluster
    devices: int
    dtype: str
    grade: int
    efficiency: Efficiency = ASSUMED
    first: int = 0  # the number of its first device in the cluster
    group: int = 1  # devices that work on one batch together: tensor parallelism
    replicas: int = 1
    reshard: bool | None = None  # as ``models.NAME.train``
    tensor: int = 1  # parts of each layer, of which the devices have the same one: they lie so far apart

    @property
    def width(self) -> int:
        return WIDTH[self.dtype]

    @property
    def memory(self) -> float:
        """Return the bytes per second of all devices of a group."""
        return self.group * self.cluster.memory_bandwidth * self.efficiency.memory[self.grade]

    @property
    def away(self) -> float:
        """Return the share of a sharded tensor that lies on other devices."""
        return (self.devices - 1) / self.devices

    def travel(self, size: float) -> float:
        """Return the seconds in which the device receives ``size`` bytes in a collective."""
        link = self.cluster.link(self.first, self.devices * self.tensor, self.replicas, self.tensor)
        return size / (link * self.efficiency.link[self.grade])

    def traded(self, size: float) -> float:
        """Return the same of an all-to-all, in which each device sends bytes of its own to each other, or of
        what one device sends to all."""
        on_host = self.cluster.devices
        link = self.cluster.link(self.first, self.devices * self.tensor, self.replicas, on_host)
        return size / (link * self.efficiency.link[self.grade])

    def between_replicas(self, size: float) -> float:
        """Return the same of a collective among devices that hold the same shard."""
        link = self.cluster.link(self.first, self.devices * self.replicas, apart=self.devices)
        return size / (link * self.efficiency.link[self.grade])

    def flops(self, share: tuple[float, float]) -> float:
        """Return the operations per second at a utilisation, of all devices of a group."""
        return self.group * self.cluster.flops(self.dtype) * share[self.grade]

    def launch(self, layers: float) -> float:
        """Return the seconds in which the kernels of so many layers are launched."""
        return layers * self.efficiency.decode_layer[self.grade]

    def tiles(self) -> tuple[float, float]:
        """Return how many rows a product takes at least, of weights that all rows have and of an expert's."""
        if self.cluster.device != "cuda":
            return 1.0, 1.0
        return self.efficiency.tile[self.grade], self.efficiency.expert_tile[self.grade]

    def activations(self, numbers: float) -> float:
        """Return the seconds in which numbers of activations pass through memory."""
        times = self.efficiency.activations[self.grade]
        return times * numbers * self.width / self.memory

    def reduced(self, size: Size, tokens: float) -> float:
        """Return the seconds of a group's sums of hidden states, twice per layer (arXiv 1909.08053)."""
        if self.group == 1:
            return 0.0
        config = size.config
        moved = 2 * (self.group - 1) / self.group * tokens * config.hidden_size * self.width
        link = self.cluster.link(self.first, self.group) * self.efficiency.link[self.grade]
        return 2 * config.num_hidden_layers * (moved / link + self.efficiency.reduction[self.grade])

    def overlapped(self, compute: float, travel: float) -> float:
        """Return the seconds of both: communication hides behind compute at best, and in part at worst."""
        return max(compute, travel) + self.efficiency.exposed[self.grade] * min(compute, travel)


# causal: rows beside each other; mask: packed rows under a dense mask; varlen: rows end to end, separated by
# their ends; flex: rows that share prompts, in blocks
Kernel = Literal["causal", "mask", "varlen", "flex"]
# Attention scores per second, relative to those of causal attention. None has been measured on a GPU yet, so
# all count alike: ``benchmarks/cuda.py --only attention`` measures them.
ATTENTION: Mapping[Kernel, float] = {"causal": 1.0, "mask": 1.0, "varlen": 1.0, "flex": 1.0}
