"""Tensor-parallel groups: consecutive devices of a pool that one server spans.

They are on one host, or all devices of as many hosts as ``serve.hosts`` says, with a part of the group each.
Devices are numbered through the pools in the plan's order, and host by host. Here hosts have 8 devices, and
the server of pool gen spans 4:

    pools {a: 6, b: 6, gen: 4}      host 0          host 1
                                    aaaaaabb        bbbbgggg
    pools {a: 6, gen: 4, b: 6}      aaaaaagg        ggbbbbbb      refused: the group reaches over two hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, lcm

from rlgraph.costs.hardware import Cluster
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNDIVIDED, UNSHARED
from rlgraph.costs.muon import steps_by_muon
from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.registry import BALANCED, serving
from rlgraph.engines.sglang_options import FP8_BLOCK, REPLICATED, WITHIN
from rlgraph.errors import GraphError, divisors, fail
from rlgraph.ir.mesh import devices_of, mesh_of
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan

GROUPS = (1, 2, 4, 8)  # numbers of devices per server that are tried


def has_groups(model: ModelPlan) -> bool:
    """Return whether a model's servers can span several devices of a host.

    Those that run already, or of which the graph says how their devices share, are as they are.
    """
    serve = model.serve
    own = bool(serve and serving(serve).own_servers and not serve.addresses)
    return own and all(getattr(serve, key) == 1 for key in WITHIN)


def groups(plan: Plan) -> Iterator[tuple[str, ServePlan, range]]:
    """Yield each model whose servers span several devices: its name, its engine, and its pool's devices."""
    for name, model in plan.models.items():
        if model.serve and model.serve.tensor_parallel > 1:
            yield name, model.serve, devices_of(plan, model.serve.pool)


def part(serve: ServePlan) -> int:
    """Return how many devices of one host a server spans."""
    return serve.tensor_parallel // serve.hosts


def sharing(plan: Plan) -> list[str]:
    """Return the models whose rows devices may share; a frozen one on another's weights does as that one."""
    return [
        name
        for name, model in plan.models.items()
        if model.train and model.train.tensor_parallel == 1 and not _follows(model)
        if (config := _config(model)) and config.model_type not in UNSHARED
    ]


def sharing_sizes(plan: Plan, per_host: int) -> list[int]:
    """Return by how many devices rows may be shared, to try: devices of a host, then whole hosts."""
    sizes, most = [size for size in GROUPS[1:] if per_host % size == 0], max(plan.pools.values())
    while (size := 2 * max(per_host, *sizes)) <= most:
        sizes.append(size)
    return sizes


def dividing(plan: Plan, setting: str, ranks: int) -> list[str]:
    """Return the models whose layers (``tensor_parallel``) or experts (``expert_parallel``) so many devices
    may divide, with all else as it is; a frozen one on other weights follows."""
    fit = []
    for name, model in plan.models.items():
        config, train = _config(model), model.train
        if not config or not train or _follows(model) or train.lora or train.compile:
            continue
        if setting == "expert_parallel":
            able = config.experts > 0 == config.experts % ranks and train.tensor_parallel == 1
        else:
            alone = train.sequence_parallel == 1 and not train.shard and not steps_by_muon(model)
            able = alone and not _whole(config) and not any(n % ranks for n in _divided(config).values())
        fit += [name] * able
    return fit


def _whole(config: Config) -> str:
    """Return why devices can't divide the layers of a model, however many they are."""
    if config.experts:
        return "is a mixture of experts, whose layers"
    if law := UNDIVIDED.get(config.model_type):
        return f"is a {config.model_type}: its {law}, so that its layers"
    return ""


def _divided(config: Config) -> dict[str, int]:
    """Return what each device that divides a layer has as much of as the others."""
    return {
        "query heads": config.num_attention_heads,
        "key heads": config.key_heads,
        "columns of the MLP": config.intermediate_size,
    }


def _follows(model: ModelPlan) -> bool:
    """Return whether a model's layout is that of another, which holds its weights."""
    return bool(model.shares) and model.frozen


def _config(model: ModelPlan) -> Config | None:
    """Return a model's configuration; None where it is not known: the engine asks the model itself."""
    try:
        return planned_size(model).config
    except GraphError:
        return None


def rows_shared(plan: Plan) -> None:
    """Check that devices which share the rows of a model can; of known models.

    Raises:
        GraphError: layers of its family look across tokens in another way than by attention that is shared.
    """
    for name, model in plan.models.items():
        config = _config(model)
        if model.train and model.train.sequence_parallel > 1 and config and config.model_type in UNSHARED:
            law = f"`{name}` is a {config.model_type}: its {UNSHARED[config.model_type]}, so that devices "
            law += f"can't share its rows (models.{name}.train.sequence_parallel)"
            raise fail("sequence-parallel", law, None, ["1"])


def layers_divided(plan: Plan) -> None:
    """Check that devices which divide the layers of a model each get as much of them; of known models.

    Raises:
        GraphError: they don't, or the model is a mixture of experts or of a family that can't be divided.
    """
    for name, model in plan.models.items():
        if not model.train or model.train.tensor_parallel == 1:
            continue
        ranks, devices = model.train.tensor_parallel, plan.pools[model.train.pool]
        config = _config(model)
        if config is None:
            continue
        setting = f"(models.{name}.train.tensor_parallel)"
        if whole := _whole(config):
            law = f"`{name}` {whole} can't be divided among devices {setting}"
            raise fail("tensor-parallel", law, None, ["1"])
        counts = _divided(config)
        for what, count in counts.items():
            if count % ranks:
                law = f"the {count} {what} of `{name}` can't be shared out among {ranks} devices {setting}"
                raise fail("tensor-parallel", law, None, divisors(gcd(devices, *counts.values())))


def experts_divided(plan: Plan) -> None:
    """Check that devices which divide the experts of a model each get as many; of known models.

    Raises:
        GraphError: they don't, or the model has no experts.
    """
    for name, model in plan.models.items():
        config = _config(model)
        if not model.train or model.train.expert_parallel == 1 or config is None:
            continue
        ranks, devices = model.train.expert_parallel, mesh_of(plan, name).shard
        setting = f"(models.{name}.train.expert_parallel)"
        if not config.experts:
            law = f"`{name}` is no mixture: it has no experts that devices could divide {setting}"
            raise fail("expert-parallel", law, None, ["1"])
        if config.experts % ranks:
            law = f"the {config.experts} experts of `{name}` can't be shared out among {ranks} devices "
            law += setting
            raise fail("expert-parallel", law, None, divisors(gcd(devices, config.experts)))


def balanced(plan: Plan) -> None:
    """Check that models whose experts are to be balanced have routers that can be; of known models.

    Raises:
        GraphError: one is no mixture, or its routers have no bias that could move.
    """
    for name, model in plan.models.items():
        config = _config(model)
        for key in BALANCED:
            if not model.train or not getattr(model.train, key) or config is None:
                continue
            law = remedy = ""
            if not config.experts:
                law, remedy = f"`{name}` is no mixture: it has no experts to balance", f"leave out {key}"
            elif key == "router_bias_update_rate" and not config.biased_choice:
                law = f"the routers of `{name}`, a {config.model_type}, choose experts without a bias"
                remedy = f"leave out {key}; models.{name}.train.router_aux_loss_coef balances them"
            if law:
                raise fail("balance", f"{law} (models.{name}.train.{key})", None, remedy=remedy)


def served_in_parts(plan: Plan) -> None:
    """Check that devices of servers have whole experts, copies of attention and blocks of 8 bits; of known
    models.

    Raises:
        GraphError: they don't.
    """
    for name, model in plan.models.items():
        config = _config(model)
        if model.serve and model.serve.quantization and (config is None or plan.device != "cuda"):
            law = f"`{name}` can't be served in {model.serve.quantization}: "
            law += "that takes Hopper GPUs" if config else "the sizes of its layers are not known"
            remedy = f"leave out models.{name}.serve.quantization"
            raise fail("quantization", law, None, remedy=remedy)
        if not model.serve or config is None:
            continue
        devices, copies = model.serve.expert_parallel, model.serve.attention_replicas
        if devices > 1 and (not config.experts or config.experts % devices):
            what = f"has {config.experts} experts" if config.experts else "is no mixture of experts"
            law = f"`{name}` {what}, which can't be dealt out to {devices} devices"
            fit = [size for size in divisors(config.experts or 1) if int(size) <= devices]
            raise fail("expert-parallel", f"{law} (models.{name}.serve.expert_parallel)", None, fit)
        if copies > 1 and config.model_type not in REPLICATED:
            law = f"SGLang has no copies of attention for `{name}`, a {config.model_type} "
            law += f"(models.{name}.serve.attention_replicas)"
            raise fail("attention-replicas", law, None, remedy="leave it out: tensor_parallel alone")
        if model.serve.quantization:
            _whole_blocks(name, model.serve, config)


def _whole_blocks(name: str, serve: ServePlan, config: Config) -> None:
    group, heads = serve.tensor_parallel, serve.tensor_parallel // serve.attention_replicas
    sparse = {config.is_sparse(layer) for layer in range(config.num_hidden_layers)}
    counts = {
        "columns of hidden states": config.hidden_size,
        "columns of queries": config.queries // heads,
        "columns of keys": config.keys // min(heads, config.key_heads),
        "columns of the MLP": config.intermediate_size // group * (False in sparse),
        "columns of an expert": config.expert_size // (group // serve.expert_parallel) * (True in sparse),
    }
    for what, count in counts.items():
        if count % FP8_BLOCK:
            law = f"the {what} of `{name}`, {count} on each device of a server, are no blocks of {FP8_BLOCK} "
            law += f"(models.{name}.serve.quantization: {serve.quantization})"
            remedy = "let a server span fewer devices (serve.tensor_parallel), or leave out quantization"
            raise fail("quantization", law, None, remedy=remedy)


def together(plan: Plan) -> dict[str, int]:
    """Return how many consecutive devices of each pool have to be on one host: 1 where no group is."""
    sizes = dict.fromkeys(plan.pools, 1)
    for model in plan.models.values():
        if model.serve:
            pool = model.serve.pool
            sizes[pool] = lcm(sizes[pool], part(model.serve))
    return sizes


def inside_hosts(plan: Plan, cluster: Cluster) -> None:
    """Check that no group reaches over more hosts of a cluster than it may, and that it has all of several.

    Raises:
        GraphError: one does not.
    """
    for name, serve, devices in groups(plan):
        size, group = part(serve), _text(name, serve)
        if serve.hosts > 1 and size != cluster.devices:
            law = f"a group of {group} has {size} devices of each host, and {cluster.cluster} has hosts of "
            law += f"{cluster.devices}: a server over several hosts takes whole ones"
            whole, at = serve.hosts * cluster.devices, f"models.{name}.serve"
            remedy = f"set {at}.tensor_parallel={whole}, or leave out {at}.hosts"
            raise fail("tensor-parallel", law, None, remedy=remedy)
        for first in devices[::size]:
            host, last = first // cluster.devices, first + size - 1
            if last // cluster.devices != host:
                law = f"devices {first} to {last}, a group of {group}, reach over "
                law += f"hosts {host} and {last // cluster.devices} of {cluster.cluster}, "
                law += f"which have {cluster.devices} devices each"
                raise fail("tensor-parallel", law, None, remedy=_remedy(name, serve, cluster.devices))


def aligned(plan: Plan) -> Plan:
    """Check the groups for hosts of unknown size, and note in the plan what is assumed of these.

    Hosts are assumed to have a multiple of the group's size, as 2, 4 and 8 of hosts of 8 devices.

    Raises:
        GraphError: a group begins at another number, so that it would reach over such hosts.
    """
    notes = []
    for name, serve, devices in groups(plan):
        size = part(serve)
        if devices.start % size:
            law = f"groups of {_text(name, serve)} begin at device {devices.start}, and where "
            law += f"hosts end at multiples of {size} they reach over two of them"
            remedy = f"{_remedy(name, serve)}, or give --cluster, which says how many devices a host has"
            raise fail("tensor-parallel", law, None, remedy=remedy)
        notes.append(f"hosts are assumed to have a multiple of {size} devices, for the servers of `{name}`")
    return replace(plan, notes=(*plan.notes, *notes))


def _text(name: str, serve: ServePlan) -> str:
    hosts = f", hosts: {serve.hosts}" if serve.hosts > 1 else ""
    return f"`{name}` (tensor_parallel: {serve.tensor_parallel}{hosts})"


def _remedy(name: str, serve: ServePlan, host: int = 0) -> str:
    size = part(serve)
    if 0 < host < size and size % host == 0:
        return f"set models.{name}.serve.hosts={size // host}: a server over several hosts takes whole ones"
    divisor = f"choose a tensor_parallel that divides {host}, and " if host % size else ""
    return f"{divisor}put pools before it whose devices are together a multiple of {size}, or none"
