"""Pools of devices: how many each has, that those named exist, and which one each engine is on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlgraph.errors import nearest
from rlgraph.ir.graph import Model
from rlgraph.syntax.settings import Pool
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import Binder, validate


def bind_pools(sections: Mapping[str, Tree], devices: int, binder: Binder) -> dict[str, int]:
    """Return pool -> devices. Pools with ``auto`` share the devices left by the others, at least one each."""
    found = {n: validate(Pool, t, f"pools.{n}", binder) for n, t in sections.items()}
    asked = {n: pool.devices if pool else "auto" for n, pool in found.items()} or {"main": "auto"}
    fixed = {name: size for name, size in asked.items() if isinstance(size, int)}
    autos = [name for name in asked if name not in fixed]
    left = devices - sum(fixed.values())
    shares = {name: left // len(autos) + (at < left % len(autos)) for at, name in enumerate(autos)}
    return {name: fixed[name] if name in fixed else max(shares[name], 1) for name in asked}


def pools_exist(
    models: Mapping[str, Tree], nodes: Mapping[str, Tree], pools: Mapping[str, int], binder: Binder
) -> None:
    """Check that every pool that a node or an engine names is one of the graph's."""
    engines = [
        (f"{name}.{engine}", section)
        for name, model in models.items()
        for engine in ("train", "serve")
        if (section := model.get(engine)) and section.is_map
    ]
    for owner, section in (*engines, *((name, node) for name, node in nodes.items() if node.is_map)):
        item = section.get("pool")
        if item and item.value not in (None, OPEN, *pools):
            law = f"`{owner}` is to run on pool `{item.value}`, which the graph does not have"
            remedy = nearest(str(item.value), pools) or f"add it: pools.{item.value}.devices=auto"
            binder.problem("unknown-pool", law, item.mark, pools, remedy)


def engine_pools(models: Iterable[Model], pools: Sequence[str]) -> dict[str, str]:
    """Return ``policy.train`` and ``policy.serve`` -> pool, for every model."""
    train = {model.name: model.spec.train.pool for model in models}
    serve = {model.name: model.spec.serve.pool for model in models}
    trains = next((pool for pool in pools if pool not in serve.values()), pools[0])
    taken = {trains, *train.values()}
    serves = next((pool for pool in pools if pool not in taken), trains)
    return {f"{name}.train": pool or trains for name, pool in train.items()} | {
        f"{name}.serve": pool or serves for name, pool in serve.items()
    }
