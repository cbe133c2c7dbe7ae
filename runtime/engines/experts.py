"""Expert parallelism: consecutive ranks each have some experts of a mixture (GShard, arXiv 2006.16668).

Each rank routes its own tokens. An all-to-all brings a copy of a token to the rank of each expert that it
chose, and another one brings back what came out, which is weighted where the token is::

    [tokens, hidden] -> [tokens k, hidden], by expert -> [received, hidden] -> experts of the rank
                     <-           weighted sum over k <-                    <-

What runs on a rank is the model's own experts, as transformers computes them (one grouped matmul where torch
has it), on tokens of one expert each. Routers are whole on every rank. How many tokens come is known to the
host before they do: every layer waits for that once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.engines.all_to_all import exchange
from rlgraph.runtime.engines.model_files import runs_own_code

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check(model: Any, ranks: int) -> None:
    """Check, before weights are read, that the experts of a model can be divided among ranks.

    Raises:
        ValueError: they can't.
    """
    mixtures = mixtures_of(model)
    counts = {module.num_experts for module in mixtures.values()}
    fault = ""
    if not mixtures:
        fault = "it has no experts in the form that transformers gives all families"
    elif any(count % ranks for count in counts):
        fault = f"its {', '.join(map(str, sorted(counts)))} experts can't be shared out"
    elif runs_own_code(model):
        fault = "it runs Python code that came with it"
    elif getattr(model.config, "quantization_config", None):
        fault = "its weights are quantised"
    if ranks > 1 and fault:
        law = f"{model.config.model_type}: {fault}, so experts can't be divided among {ranks} ranks"
        raise ValueError(f"{law}; set train.expert_parallel to 1")


def mixtures_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules that hold all experts of a layer, each weight of which has a row per expert."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: Any) -> bool:
    is_fused = hasattr(module, "_apply_gate") and hasattr(module, "num_experts")  # by transformers' decorator
    parameters = [*module.parameters(recurse=False)]
    if not is_fused or not parameters:
        return False
    return all(parameter.dim() > 1 and len(parameter) == module.num_experts for parameter in parameters)


def divide(model: torch.nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Leave this rank its experts of each layer, in place; weights may have no memory yet.

    Returns:
        The names of the parameters that have been divided, along their first dimension.
    """
    names = []
    for prefix, module in mixtures_of(model).items():
        module.num_experts //= group.size()
        for name, parameter in [*module.named_parameters(recurse=False)]:
            own_experts = parameter.detach()[group.rank() * module.num_experts :][
                : module.num_experts
            ].clone()
            setattr(module, name, torch.nn.Parameter(own_experts, parameter.requires_grad))
            names.append(f"{prefix}.{name}")
        module.forward = partial(_dispatched, group, module.num_experts, module.forward)
    return names


def _dispatched(
    group: dist.ProcessGroup,
    experts_per_rank: int,
    experts: Experts,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the sum, by ``weights [tokens, k]``, of what ``chosen [tokens, k]`` experts of all ranks make of
    ``hidden [tokens, size]``; each rank has ``experts_per_rank`` of its own."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    tokens_per_expert, sizes_out, sizes_in = _counted(flat, experts_per_rank, group)
    received = exchange(hidden[order // chosen.shape[1]], sizes_out, sizes_in, group)
    expert = torch.arange(experts_per_rank, device=flat.device).repeat(group.size())
    expert = expert.repeat_interleave(tokens_per_expert, output_size=len(received))[:, None]
    out = experts(received, expert, torch.ones_like(expert, dtype=weights.dtype))
    returned = exchange(out, sizes_in, sizes_out, group)[order.argsort()].view(*chosen.shape, -1)
    return (returned * weights[..., None]).sum(1).to(hidden.dtype)


def _counted(
    flat: torch.Tensor, experts_per_rank: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return how many tokens come for each of this rank's experts, from each rank (``[ranks experts]``),
    how many go to each rank, and how many come from it. ``flat [tokens k]`` are the experts chosen here.
    """
    ranks = group.size()
    sent_tokens = flat.new_zeros(ranks * experts_per_rank).scatter_add_(0, flat, torch.ones_like(flat))
    received_tokens = torch.empty_like(sent_tokens)
    dist.all_to_all_single(received_tokens, sent_tokens, group=group)
    sizes_out, sizes_in = (
        torch.stack([sent_tokens, received_tokens]).view(2, ranks, experts_per_rank).sum(2).tolist()
    )
    return received_tokens, sizes_out, sizes_in
