"""The description of a cluster: its devices, what each can do, and how fast they reach each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from rlgraph.section import Count, Positive, Section
from rlgraph.syntax.source import read
from rlgraph.syntax.validate import read_record


class Cluster(BaseModel):
    """Hosts of equal devices. Sizes are in bytes, rates in bytes or operations per second per device."""

    model_config = Section.model_config

    cluster: str = Field(pattern=r"^[\w.-]+$", description="the cluster's name: one word.")
    hosts: Count = Field(description="how many machines.")
    devices: Count = Field(description="devices of one host.")
    memory: Positive = Field(description="bytes of one device.")
    bf16_flops: Positive = Field(description="bfloat16 operations a second, dense, at the device's best.")
    fp32_flops: Positive = Field(description="float32 operations a second.")
    memory_bandwidth: Positive = Field(description="bytes per second between a device and its memory.")
    intra_link: Positive = Field(description="bytes per second between two devices of a host.")
    inter_link: Positive = Field(description="bytes per second of one network adapter to another host.")
    adapters: Count | None = None
    """network adapters of one host; null: one per device."""
    linked: Count | None = None
    """devices that `intra_link` joins, of several hosts; null: those of one."""
    host_link: Positive = Field(default=32e9, description="bytes per second between device and host memory.")
    host_step: Positive | None = None
    """numbers per second that a worker's optimizer steps on its host; null: a range."""
    host_memory: Positive | None = None
    """bytes of a host that offloaded states may take; null: enough."""
    kind: Literal["cuda", "cpu"] | None = None
    """what a device is; null: cuda where bfloat16 is faster than float32."""
    disk: Positive | None = None
    """bytes per second that all hosts together write checkpoints with; null: not known."""
    reserve: float = Field(ge=0, description="bytes of a device that no model gets: context, buffers, slack.")
    margin: float = Field(default=0.05, ge=0, lt=1)
    """the share of a device's memory that plans leave free."""

    @property
    def total(self) -> int:
        """Return the number of devices of all hosts."""
        return self.hosts * self.devices

    @property
    def device(self) -> str:
        """Return the kind of device: ``cuda`` or ``cpu``."""
        if self.kind:
            return self.kind
        return "cuda" if self.bf16_flops > self.fp32_flops else "cpu"

    def flops(self, dtype: str) -> float:
        """Return the operations per second in ``float32`` or ``bfloat16``."""
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops

    @property
    def usable(self) -> int:
        """Return the bytes of a device that a plan may fill."""
        return int(self.memory * (1 - self.margin))

    def link(self, first: int, devices: int, groups: int = 1, apart: int = 1) -> float:
        """Return the bytes per second of one device in a collective over ``devices`` from the ``first``.

        The slowest link decides. Devices are numbered host by host. Over several hosts a collective goes
        around in as many rings as a host has adapters for its devices in it.

        Args:
            first: the number of the first device.
            devices: how many take part.
            groups: how many such collectives there are, of consecutive groups of devices.
            apart: how many collectives at once share the adapters, of devices that lie so far apart; as many
                as a host has devices if each device sends its own bytes, as in an all-to-all.
        """
        linked = self.linked or self.devices
        starts = range(first, first + groups * devices, devices)
        crosses = any(start // linked != (start + devices - 1) // linked for start in starts)
        if not crosses:
            return self.intra_link
        on_host = min(self._on_one_host(start, devices) for start in starts)
        adapters = self.adapters or self.devices
        rings = max(adapters * on_host / self.devices, 1.0) / min(apart, on_host)
        return min(self.intra_link, self.inter_link * rings)

    def _on_one_host(self, start: int, devices: int) -> int:
        """Return how many devices of a collective the host has that has the fewest of them."""
        end = start + devices
        on_first_host = self.devices - start % self.devices
        on_last_host = (end - 1) % self.devices + 1
        return min(devices, on_first_host, on_last_host)


FOLDER = Path(__file__).parent / "clusters"
Here = Callable[[], Cluster]  # detects the cluster for which ``auto`` stands


KINDS = ("a100", "h20", "h100", "h200", "b200", "gb200")


def shipped_clusters() -> list[str]:
    """Return the names of the clusters that come with rlgraph, in the most common sizes."""
    gpus = [f"{kind}-{count}" for kind in KINDS for count in (8, 64)]
    return ["cpu", *gpus]


def shipped_file(name: str) -> Path:
    """Return the file that describes a cluster that comes with rlgraph."""
    return FOLDER / f"{name}.yaml"


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a YAML file describes.

    Raises:
        GraphError: the file is wrong: with every problem found.
    """
    return read_record(Cluster, read(path), "cluster")
