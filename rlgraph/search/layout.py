"""A layout of a graph on a cluster: pools, groups, micro-batches, and what of a model devices divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlgraph.costs.optimizers import may_step_on_host
from rlgraph.ir.plan import ModelPlan, Plan, TrainPlan
from rlgraph.planning.device_groups import has_groups, whole_hosts
from rlgraph.planning.model_limits import dividing, sharing
from rlgraph.search.moves import Settings, surplus_stays

# settings of models that train, by what is on the host: each is tried where nothing fits with those before it
HOST: Mapping[str, tuple[str, ...]] = {
    "": (),
    ", optimizer on the host": ("optimizer_offload",),
    ", optimizer and activations on the host": ("optimizer_offload", "activation_offload"),
}

Division = tuple[str, int]  # a setting, as ``expert_parallel``, and how many devices divide what it says


@dataclass(frozen=True)
class PoolLayout:
    """One choice: devices that only generate (0: none), models that join them, groups, micro-batches."""

    generating: int
    scorers: frozenset[str]  # scoring models and critics on the pool that generates
    group: int
    micro: int
    recompute: bool
    shard: int | None = None  # devices over which the models that train are sharded; None: as the graph says
    host: str = ""  # of HOST
    sequence: int | None = None  # devices that share the tokens of a row; None: as the graph says
    divided: Division | None = None  # None: as the graph says

    @property
    def family(self) -> str:
        """Return in words how the devices are shared out."""
        if not self.generating:
            return "together"
        if not self.scorers:
            return "apart"
        return f"apart, {' and '.join(sorted(self.scorers))} with generation"

    @property
    def ways(self) -> int:
        """Return how many devices share a row or, where they divide a model, do that."""
        if self.divided:
            return self.divided[1]
        return self.sequence or 1

    def training_pools(self, total: int) -> list[int]:
        """Return the devices of each pool that has train engines, of so many devices in all."""
        sizes = [total - self.generating]
        if self.scorers:
            sizes.append(self.generating)
        return sizes

    def settings(self, plan: Plan, total: int) -> Settings:
        """Return what to set in the graph. Pools keep the names that it has, as far as it has two."""
        training_pool, generating_pool = self._pool_names(plan)
        pools = {training_pool: _pool(plan, training_pool, total - self.generating)}
        if self.generating:
            pools[generating_pool] = _pool(plan, generating_pool, self.generating)
        settings: dict[str, Any] = {"pools": pools}
        settings |= surplus_stays(plan)
        settings |= self._shared_settings(plan)
        for name, model in plan.models.items():
            if model.train:
                pool = generating_pool if name in self.scorers else training_pool
                settings |= self._train_settings(name, model, model.train, pool)
            if model.serve:
                settings[f"models.{name}.serve.pool"] = generating_pool
            if has_groups(model):
                settings[f"models.{name}.serve.tensor_parallel"] = self.group
        return settings

    def _shared_settings(self, plan: Plan) -> Settings:
        """Return the settings of models whose rows devices share, or which devices divide."""
        settings: dict[str, Any] = {}
        if self.sequence:
            for name in sharing(plan):
                settings[f"models.{name}.train.sequence_parallel"] = self.sequence
        if self.divided:
            setting, ranks = self.divided
            for name in dividing(plan, setting, ranks):
                settings[f"models.{name}.train.{setting}"] = ranks
        return settings

    def _pool_names(self, plan: Plan) -> tuple[str, str]:
        """Return the names of the pool that trains and of the one that generates, which may be the same."""
        training_pool, *further = plan.pools
        if not self.generating:
            return training_pool, training_pool
        if not further:
            return training_pool, "gen"
        return training_pool, further[0]

    def _train_settings(self, name: str, model: ModelPlan, train: TrainPlan, pool: str) -> Settings:
        path = f"models.{name}.train"
        settings: dict[str, Any] = {f"{path}.pool": pool, f"{path}.micro_tokens": self.micro}
        may_shard = train.tensor_parallel == 1 and name not in self.scorers
        if self.shard and may_shard:
            settings[f"{path}.shard"] = self.shard
        if model.optimizer is None:
            return settings
        settings[f"{path}.recompute"] = self.recompute
        allowed = {"optimizer_offload": may_step_on_host(model), "activation_offload": self.recompute}
        for offload in HOST[self.host]:
            if allowed[offload]:
                settings[f"{path}.{offload}"] = True
        return settings


def _pool(plan: Plan, pool: str, devices: int) -> dict[str, int]:
    """Return a pool's settings; it takes hosts whole where it has, or where a pool that it comes from has."""
    per_host = {}
    for name, hosts in whole_hosts(plan).items():
        per_host[name] = plan.pools[name] // hosts
    devices_of_host = max(per_host.values(), default=0)
    if pool in plan.pools:
        devices_of_host = per_host.get(pool, 0)
    if not devices_of_host:
        return {"devices": devices}
    return {"devices": devices, "hosts": max(devices // devices_of_host, 1)}
