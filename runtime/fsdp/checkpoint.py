"""Save and load a sharded model with its optimizer, and export it for Hugging Face.

A checkpoint written by any number of ranks loads on any other (torch.distributed.checkpoint).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from rlgraph.runtime.fsdp.load import quiet

Scheduler = torch.optim.lr_scheduler.LRScheduler


def save_state(
    directory: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    group: dist.ProcessGroup,
) -> None:
    """Write parameters and, of a model that trains, optimizer and schedule. Every rank calls it."""
    dcp.save(_state(model, optimizer, scheduler), checkpoint_id=directory, process_group=group)


def load_state(
    directory: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    group: dist.ProcessGroup,
) -> None:
    """Read what ``save_state`` wrote into a model of the same shape. Every rank calls it."""
    state = _state(model, optimizer, scheduler)
    dcp.load(state, checkpoint_id=directory, process_group=group)
    set_model_state_dict(model, state["model"])
    if optimizer is not None and scheduler is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def write_pretrained(
    directory: str, model: Any, weights: dict[str, torch.Tensor], tokenizer: str | Path
) -> None:
    """Write a Hugging Face directory from full weights, with the tokenizer copied from another."""
    from transformers import AutoTokenizer

    with quiet():
        model.save_pretrained(directory, state_dict=weights)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Scheduler | None
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None and scheduler is not None:
        _start(optimizer)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        state["scheduler"] = scheduler.state_dict()
    return state


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that never stepped its zero moments: torch would take a step to make them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
