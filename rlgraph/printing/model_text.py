"""Prints a model of a plan: how it is trained, the engines that hold it, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rlgraph.costs.limits import ring_ranks
from rlgraph.costs.lora_size import SLOTS, shares_base
from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.optimizers import OPTIMIZERS
from rlgraph.engines.registry import own_base, serving
from rlgraph.errors import GraphError
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, TrainPlan


def model_text(plan: Plan, name: str) -> Iterator[str]:
    """Yield the lines about a model, the first of which says how it is trained and what holds it."""
    model = plan.models[name]
    heading = f"  model {name}: {_training(model)}, head {model.head}, held by {_engines(plan, name)}"
    if model.rate:
        heading += f", lr {model.rate}"
    yield heading
    if model.shares:
        yield f"    on the weights of {model.shares}, held once: they are the same, and frozen"
    if model.serve and model.serve.lora:
        yield from _base_text(plan, name, model.serve)
    if model.trust_remote_code:
        yield f"    runs the Python files of {model.path}"
    if model.config:
        changes = ", ".join(f"{key} {value}" for key, value in model.config.items())
        yield f"    with another config.json: {changes}"


def _base_text(plan: Plan, name: str, serve: ServePlan) -> Iterator[str]:
    """Yield whether a device that trains an adapter holds the frozen weights once more to generate."""
    train = plan.models[name].train
    assert train
    if train.pool != serve.pool:
        return
    if shares_base(plan, name, serve.pool):
        yield "    generates with the frozen weights of its train engine, held once"
        return
    reason = own_base(serve, train, plan.meshes[name].shard)
    if not reason:
        reason = f"serve.lora is {serve.lora}"
    yield f"    frozen weights are held a second time to generate: {reason}"


def _training(model: ModelPlan) -> str:
    """Return whether a model is trained, and with which optimizer if that is not the usual one."""
    if model.optimizer is None:
        return "frozen" if model.frozen else "tokenizer only"
    state = "frozen" if model.frozen else "trained"
    return state + OPTIMIZERS[model.optimizer.kind].plan_note


def _engines(plan: Plan, name: str) -> str:
    model = plan.models[name]
    engines = []
    if model.train:
        features = ", ".join(_train_features(plan, name, model.train))
        engines.append(f"{model.train.engine} ({features})")
    if model.serve:
        features = ", ".join(_serve_features(model.serve))
        engines.append(f"{model.serve.engine} ({features})")
    return " and ".join(engines) or "no engine"


def _train_features(plan: Plan, name: str, train: TrainPlan) -> list[str]:
    """Return features such as ``bfloat16``, ``8-way shard x 4 replicas``, ``each row over 2 devices``."""
    features: list[str] = [train.dtype]
    mesh = plan.meshes[name]
    if max(mesh.replicate, mesh.tensor, mesh.experts) > 1:
        features.append(str(mesh))
    if train.head_dtype:
        features.append(f"head {train.head_dtype}")
    if train.lora and train.lora.quantize:
        features.append(f"frozen linear layers in 4 bits, {train.lora.quantize}")
    if train.recompute:
        features.append("computing activations again")
    if train.activation_offload:
        features.append("activations on the host")
    if train.optimizer_offload:
        features.append("optimizer on the host")
    if train.router_aux_loss_coef:
        features.append(f"auxiliary loss of routers times {train.router_aux_loss_coef:g}")
    if train.router_bias_update_rate:
        features.append(f"bias of routers moved by {train.router_bias_update_rate:g} per step")
    if train.sequence_parallel > 1:
        features.append(_sequence_sharing(plan.models[name], train.sequence_parallel))
    return features


def _sequence_sharing(model: ModelPlan, ranks: int) -> str:
    """Return text such as ``each row over 16 devices, 8 for its 8 key heads x 2 in a ring``."""
    text = f"each row over {ranks} devices"
    # The size of a model may be unknown here. Its engine reads the heads from the model itself.
    with suppress(GraphError):
        heads = planned_size(model).config.key_heads
        ring = ring_ranks(heads, ranks)
        if ring > 1:
            text += f", {ranks // ring} for its {heads} key heads x {ring} in a ring"
    return text


def _serve_features(serve: ServePlan) -> list[str]:
    features: list[str] = [serve.dtype]
    if serve.quantization:
        features.append(f"linear layers in {serve.quantization}")
    if serve.hosts > 1:
        features.append(f"servers of {serve.tensor_parallel} devices over {serve.hosts} hosts")
    if serve.lora == "adapter":
        if serving(serve).own_servers:
            features.append(f"adapter in one of {SLOTS} slots beside frozen weights")
        else:
            features.append("adapter beside frozen weights")
    return features
