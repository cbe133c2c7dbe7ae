"""One layout of a graph on a cluster: pools, groups, micro-batches, and what of a model devices divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlgraph.costs.muon import may_step_on_host
from rlgraph.ir.plan import Plan
from rlgraph.planning.device_groups import has_groups, whole_hosts
from rlgraph.planning.model_limits import dividing, sharing

# settings of models that train, by what is on the host: each is tried where nothing fits with those before it
HOST: Mapping[str, tuple[str, ...]] = {
    "": (),
    ", optimizer on the host": ("optimizer_offload",),
    ", optimizer and activations on the host": ("optimizer_offload", "activation_offload"),
}

Division = tuple[str, int]  # a setting, as ``expert_parallel``, and how many devices divide what it says
Settings = Mapping[str, Any]  # path in the graph -> value


@dataclass(frozen=True)
class PoolLayout:
    """One choice: devices that only generate (0: none), models beside them, groups, micro-batches."""

    generating: int
    beside: frozenset[str]  # scoring models and critics on the pool that generates
    group: int
    micro: int
    recompute: bool
    shard: int | None = None  # devices over which the models that train are sharded; None: as the graph says
    host: str = ""  # of HOST
    sequence: int | None = None  # devices that share the tokens of a row; None: as the graph says
    divided: Division | None = None  # None: as the graph says

    @property
    def family(self) -> str:
        """Return what it is called among others: how the devices are shared out."""
        if not self.generating:
            return "together"
        return f"apart, {' and '.join(sorted(self.beside))} with generation" if self.beside else "apart"

    @property
    def ways(self) -> int:
        """Return how many devices share a row or, where they divide a model, do that."""
        return self.divided[1] if self.divided else self.sequence or 1

    def trained(self, total: int) -> list[int]:
        """Return the devices of each pool that has train engines, of so many devices in all."""
        return [total - self.generating, *[self.generating] * bool(self.beside)]

    def settings(self, plan: Plan, total: int) -> Settings:
        """Return what to set in the graph. Pools keep the names that it has, as far as it has two."""
        trains, generates = [*plan.pools, "gen"][:2] if self.generating else [next(iter(plan.pools))] * 2
        pools = {trains: total - self.generating} | ({generates: self.generating} if self.generating else {})
        settings: dict[str, Any] = {
            "pools": {pool: _pool(plan, pool, count) for pool, count in pools.items()}
        }
        for name in sharing(plan) if self.sequence else ():
            settings[f"models.{name}.train.sequence_parallel"] = self.sequence
        if self.divided:
            for name in dividing(plan, *self.divided):
                settings[f"models.{name}.train.{self.divided[0]}"] = self.divided[1]
        for name, model in plan.models.items():
            if model.train:
                settings[f"models.{name}.train.pool"] = generates if name in self.beside else trains
                settings[f"models.{name}.train.micro_tokens"] = self.micro
            whole = model.train and model.train.tensor_parallel == 1
            if whole and self.shard and name not in self.beside:
                settings[f"models.{name}.train.shard"] = self.shard
            if model.train and model.optimizer:
                settings[f"models.{name}.train.recompute"] = self.recompute
                may = {"optimizer_offload": may_step_on_host(model), "activation_offload": self.recompute}
                chosen = (setting for setting in HOST[self.host] if may[setting])
                settings |= {f"models.{name}.train.{setting}": True for setting in chosen}
            if model.serve:
                settings[f"models.{name}.serve.pool"] = generates
            if has_groups(model):
                settings[f"models.{name}.serve.tensor_parallel"] = self.group
        return settings


def _pool(plan: Plan, pool: str, devices: int) -> dict[str, int]:
    """Return a pool's settings; it takes hosts whole where it has, or where a pool that it comes from has."""
    whole = {name: plan.pools[name] // hosts for name, hosts in whole_hosts(plan).items()}
    each = whole.get(pool, 0 if pool in plan.pools else max(whole.values(), default=0))
    return {"devices": devices, **({"hosts": max(devices // each, 1)} if each else {})}
