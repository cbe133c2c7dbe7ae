"""A cluster: how many devices there are, what each can do, and how fast they reach each other."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.sections import Count, Positive, Section
from rlgraph.source import read
from rlgraph.validate import Binder, validate

FOLDER = Path(__file__).parent / "clusters"


class Cluster(BaseModel):
    """Hosts of equal devices. Sizes in bytes, rates in bytes or operations a second, a device, one way."""

    model_config = Section.model_config

    cluster: str = Field(pattern=r"^[\w.-]+$", description="the cluster's name: one word.")
    hosts: Count = Field(description="how many machines.")
    devices: Count = Field(description="devices of one host.")
    memory: Positive = Field(description="bytes of one device.")
    bf16_flops: Positive = Field(description="bfloat16 operations a second, dense, at the device's best.")
    fp32_flops: Positive = Field(description="float32 operations a second.")
    memory_bandwidth: Positive = Field(description="bytes a second between a device and its memory.")
    intra_link: Positive = Field(description="bytes a second between two devices of a host.")
    inter_link: Positive = Field(description="bytes a second of one device to another host.")
    host_link: Positive = Field(
        default=32e9, description="bytes a second between a device and its host's memory."
    )
    host_memory: Positive | None = Field(
        default=None, description="bytes of a host that offloaded states may take; null: enough."
    )
    reserve: float = Field(ge=0, description="bytes of a device that no model gets: context, buffers, slack.")

    @property
    def total(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices

    def flops(self, dtype: str) -> float:
        """Operations a second in ``float32`` or ``bfloat16``."""
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops

    def link(self, first: int, devices: int) -> float:
        """Bytes a second of one device in a collective over ``devices`` from the ``first``.

        The slowest link decides. Devices are numbered host by host.
        """
        inside = first // self.devices == (first + devices - 1) // self.devices
        return self.intra_link if inside else min(self.intra_link, self.inter_link)


def shipped_clusters() -> list[str]:
    """The names of the clusters that come with rlgraph."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, the one that a YAML file describes, or, as ``auto``, this machine.

    Raises:
        GraphError: there is no such cluster, or the file is wrong: with every problem found.
    """
    if name == "auto":
        from rlgraph.machine import this_machine  # it makes a cluster

        return this_machine()
    path = FOLDER / f"{name}.yaml" if name in shipped_clusters() else Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        known = ["auto", *shipped_clusters()]
        remedy = nearest(name, known) or "or give the path of a YAML file (see docs/cost_model.md)"
        raise fail("unknown-cluster", f"there is no cluster `{name}`", None, known, remedy)
    binder = Binder()
    found = validate(Cluster, read(path), "cluster", binder)
    if binder.problems or not isinstance(found, Cluster):
        raise GraphError(binder.problems)
    return found
