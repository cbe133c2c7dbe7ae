"""Tensor parallelism: consecutive ranks each have a part of every decoder layer (arXiv 1909.08053).

The parts are those of Megatron-LM; the plan that transformers has for a family says of which layers. Of a
``colwise`` linear layer a rank has some outputs: some heads, or a part of the MLP's width. Of the ``rowwise``
one behind it, it has the inputs that these are::

    hidden -> colwise [outputs / ranks, hidden] -> attention, or activation
           -> rowwise [hidden, inputs / ranks]  -> sum over the ranks -> hidden

So an attention and an MLP each end with a sum of hidden states, and each begins, in the backward pass, with a
sum of their gradients. Everything else is whole on every rank, which computes the same with it: embeddings,
norms and the head. Parts are plain tensors; FSDP2 shards them over the ranks that have the same part.

The ranks of a group have the same rows for the length of a call, as those that share tokens do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.runtime.engines.model_files import runs_own_code
from rlgraph.runtime.engines.sequence.groups import RowGroup
from rlgraph.runtime.engines.weights.extents import Cut

DIMENSIONS = {"colwise": 0, "rowwise": 1}  # style -> the dimension of a linear layer's weight that is divided
PER_HEAD = "replicated_with_grad_allreduce"  # whole on each rank, which uses it for its own heads


@dataclass(frozen=True)
class LayerParts:
    """The parameters of which each rank of a group has a part; by default none.

    Names are those of the model's parameters. Ranks of ``spread`` parts share nothing: what is whole is
    sharded over them too, and each has rows of its own (``engines/experts.py``).
    """

    ranks: RowGroup = field(default_factory=RowGroup)
    dimensions: Mapping[str, int] = field(default_factory=dict)  # of each such parameter, which is divided
    per_head: frozenset[str] = frozenset()  # whole ones, whose gradient on a rank is that of its own heads
    mesh: DeviceMesh | None = None  # of spread parts: the ranks that have the same one

    def cut(self, name: str) -> Cut | None:
        """Return which part of a parameter this rank has; None of one that is whole."""
        dimension = self.dimensions.get(name)
        return None if dimension is None else (dimension, self.ranks.rank, self.ranks.ranks)

    def times(self, name: str) -> int:
        """Return how many times larger a parameter is than this rank's part."""
        return self.ranks.ranks if name in self.dimensions else 1

    @property
    def spread(self) -> bool:
        return self.mesh is not None

    def holders(self, name: str, copy: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the ranks over which a parameter is sharded, out of those of a ``copy``."""
        if self.mesh is None or name not in self.dimensions:
            return copy
        return self.mesh.get_group(self.mesh.ndim - 1)

    def writes(self, name: str) -> bool:
        """Return whether this rank writes what it has of a parameter: of a whole one the first does."""
        return self.spread or name in self.dimensions or not self.ranks.rank

    @property
    def alike(self) -> int:
        """Return how many ranks have the same shards of what is whole."""
        return 1 if self.spread else self.ranks.ranks

    def shares(self, names: Iterable[str]) -> list[float] | None:
        """Return this rank's share in each parameter of its group; None where it is alone."""
        if self.alike == 1:
            return None
        return [self.times(name) / self.ranks.ranks for name in names]

    def shape(self, name: str, own_part: torch.Tensor) -> list[int]:
        """Return the shape of a whole parameter from that of this rank's part."""
        shape = list(own_part.shape)
        if name in self.dimensions:
            shape[self.dimensions[name]] *= self.ranks.ranks
        return shape

    def joined(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors of one data type, those of a bucket, from every rank's parts. Collective."""
        divided = [index for index, name in enumerate(names) if name in self.dimensions]
        if not divided:
            return list(parts)
        flat_parts = torch.cat([parts[index].flatten() for index in divided])
        ranks = flat_parts.new_empty(self.ranks.ranks, len(flat_parts))
        dist.all_gather(list(ranks.unbind(0)), flat_parts, group=self.ranks.group)
        gathered = ranks.split([parts[index].numel() for index in divided], dim=1)
        full = list(parts)
        for index, flat_by_rank in zip(divided, gathered, strict=True):
            by_rank = [flat.view(parts[index].shape) for flat in flat_by_rank]
            full[index] = torch.cat(by_rank, self.dimensions[names[index]])
        return full

    def add_up(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sum the gradients of what is used per head, in place, over the ranks that have the heads."""
        summed = [gradient for name, gradient in gradients.items() if name in self.per_head]
        if not summed:
            return
        flat = torch.cat([gradient.flatten() for gradient in summed])
        dist.all_reduce(flat, group=self.ranks.group)
        totals = flat.split([gradient.numel() for gradient in summed])
        for gradient, total in zip(summed, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


WHOLE = LayerParts()


@dataclass(frozen=True)
class ExpertGroup(RowGroup):
    """Consecutive ranks that each have some of the experts, and rows of their own; by default one rank.

    ``mesh`` has this rank and those that have the same experts, with replicas along its first dimension
    where it has two.
    """

    mesh: DeviceMesh | None = None


def check(model: Any, ranks: int) -> None:
    """Check, before weights are read, that the layers of a model can be divided.

    Raises:
        ValueError: they can't.
    """
    if ranks == 1:
        return
    for fault in _faults(model, ranks):
        law = f"{model.config.model_type}: {fault}, so its layers can't be divided among {ranks} ranks"
        raise ValueError(f"{law}; set train.tensor_parallel to 1")


def divide(model: Any, ranks: RowGroup) -> LayerParts:
    """Leave this rank its part of each decoder layer, in place; weights may have no memory yet."""
    if ranks.group is None:
        return WHOLE
    dimensions: dict[str, int] = {}
    per_head = set[str]()
    styles = _styles(model)
    names = {module: name for name, module in model.named_modules()}
    for module, style in styles.items():
        module_parameters = dict(module.named_parameters(names[module]))
        if style == PER_HEAD:
            per_head |= module_parameters.keys()
            continue
        divided = module_parameters if style == "colwise" else {f"{names[module]}.weight"}
        dimensions |= dict.fromkeys(divided, DIMENSIONS[style])
        for name in divided:
            parameter = module_parameters[name]
            own_part = parameter.detach().chunk(ranks.ranks, DIMENSIONS[style])[ranks.rank]
            own_part = own_part.clone(memory_format=torch.contiguous_format)
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(own_part, parameter.requires_grad))
        if style == "rowwise":
            linear = module
            assert isinstance(linear, torch.nn.Linear), "others are refused by `check`"
            module.forward = partial(_summed, linear, ranks.group)
    for block in {model.get_submodule(names[module].rpartition(".")[0]) for module in styles}:
        block.register_forward_pre_hook(partial(_enter, ranks.group), with_kwargs=True)
    return LayerParts(ranks, dimensions, frozenset(per_head))


def _styles(model: Any) -> dict[torch.nn.Module, str]:
    """Return what transformers' plan says of a model's modules."""
    plan = model.base_model.config.base_model_tp_plan or {}
    modules_by_name = ((_any_layer(name), module) for name, module in model.base_model.named_modules())
    return {module: plan[name] for name, module in modules_by_name if name in plan}


def _any_layer(name: str) -> str:
    """Return the name of a module, or of a parameter, as a plan has it for all layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _faults(model: Any, ranks: int) -> Iterator[str]:
    """Yield why the layers of a model can't be divided."""
    styles = _styles(model)
    unsupported = _unsupported_styles(model.base_model)
    if unsupported:
        yield f"its plan asks for {', '.join(unsupported)}, which is not supported"
    if "colwise" not in styles.values():
        yield "transformers has no tensor-parallel plan for it"
    if runs_own_code(model):
        yield "it runs Python code that came with it"
    if getattr(model.config, "quantization_config", None):
        yield "its weights are quantised"
    config = model.config.get_text_config()
    for field_name, kind in (("num_attention_heads", "query heads"), ("num_key_value_heads", "key heads")):
        heads = getattr(config, field_name, None)
        if heads and heads % ranks:
            yield f"its {heads} {kind} can't be shared out"
    for module, style in styles.items():
        if style == PER_HEAD:
            continue
        if type(module) is not torch.nn.Linear:
            yield f"its {type(module).__name__} is not a linear layer"
            continue
        columns = module.weight.shape[DIMENSIONS[style]]
        if columns % ranks:
            yield f"{columns} columns of its layers can't be shared out"
    for block in model.base_model.modules():
        if _is_partly_divided(block, styles):
            yield f"only a part of {type(block).__name__} is in its plan"


def _unsupported_styles(base: Any) -> list[str]:
    """Return the styles that a plan has for the modules or parameters of a model, and that are not known."""
    plan = base.config.base_model_tp_plan or {}
    parameters = {_any_layer(name) for name, _ in base.named_parameters()}
    modules = {_any_layer(name) for name, _ in base.named_modules()}
    unsupported = set()
    for name in (parameters | modules) & plan.keys():
        is_known = plan[name] in DIMENSIONS or plan[name] == PER_HEAD
        if name in parameters or not is_known:
            unsupported.add(plan[name])
    return sorted(unsupported)


def _is_partly_divided(block: torch.nn.Module, styles: Mapping[torch.nn.Module, str]) -> bool:
    """Return whether a plan divides some of a block's layers and leaves out others that have weights.

    What is left out would see a part of the heads, or of the width.
    """
    children = [child for child in block.children() if [*child.parameters()]]
    child_styles = [styles.get(child, "") for child in children]
    if not {*child_styles} & {*DIMENSIONS}:
        return False
    has_own_weights = "" in child_styles or bool([*block.parameters(recurse=False)])
    is_whole = child_styles.count("rowwise") == 1 and "colwise" in child_styles
    return has_own_weights or not is_whole


def _enter(group: dist.ProcessGroup, _module: Any, args: Any, kwargs: Any) -> Any:
    """Have an attention or an MLP propagate the gradients of all ranks to its hidden states."""
    if "hidden_states" in kwargs:
        entered = _Enter.apply(kwargs["hidden_states"], group)  # type: ignore[no-untyped-call]  # torch gives it no types
        return args, {**kwargs, "hidden_states": entered}
    entered = _Enter.apply(args[0], group)  # type: ignore[no-untyped-call]  # torch gives it no types
    return (entered, *args[1:]), kwargs


def _summed(module: torch.nn.Linear, group: dist.ProcessGroup, inputs: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's output ``[..., hidden]`` from each rank's part of its inputs."""
    partial_sum = torch.nn.functional.linear(inputs, module.weight)
    out: torch.Tensor = _Sum.apply(partial_sum, group)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out if module.bias is None else out + module.bias


class _Enter(torch.autograd.Function):
    """Leaves hidden states as they are; sums their gradients over a group."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Sums hidden states over a group, in place; leaves their gradients as they are."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(hidden)
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
